"""Methods that papers compare with, written against the public interface of methods and policies, as a user's own would
be; and the networks of DT-FM's evaluation.

Importing this package does not import torch, so that a scheduler and simulations can use its policies.
"""

from recipes.baselines.parameter_server import HetPipe as HetPipe
from recipes.baselines.parameter_server import ParameterServer as ParameterServer
