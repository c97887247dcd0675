"""Methods that papers compare with, written as anybody's own: through the public interface of methods and policies. And
the networks of DT-FM's evaluation.

Importing this package imports no torch, so that a scheduler and simulations can take its policies.
"""

from recipes.baselines.parameter_server import HetPipe as HetPipe
from recipes.baselines.parameter_server import ParameterServer as ParameterServer
