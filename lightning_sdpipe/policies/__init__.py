"""Policies: which workers average together, and when. Events and the time go in, decisions come out.

Nothing here imports another part of the package (errors excepted), a clock, a socket, a thread or a random source.
``docs/policies.md`` shows how to write a policy of your own.
"""

from lightning_sdpipe.errors import check_integer as check_integer
from lightning_sdpipe.errors import refusal as refusal
from lightning_sdpipe.policies.decisions import Decision as Decision
from lightning_sdpipe.policies.decisions import Group as Group
from lightning_sdpipe.policies.decisions import Reason as Reason
from lightning_sdpipe.policies.events import Event as Event
from lightning_sdpipe.policies.events import Joined as Joined
from lightning_sdpipe.policies.events import Left as Left
from lightning_sdpipe.policies.events import Lost as Lost
from lightning_sdpipe.policies.events import Progress as Progress
from lightning_sdpipe.policies.events import Ready as Ready
from lightning_sdpipe.policies.events import Restarted as Restarted
from lightning_sdpipe.policies.events import Tick as Tick
from lightning_sdpipe.policies.events import Worker as Worker
from lightning_sdpipe.policies.group_policy import GroupPolicy as GroupPolicy
from lightning_sdpipe.policies.participants import Participants as Participants
from lightning_sdpipe.policies.policy import Policy as Policy
from lightning_sdpipe.policies.policy import PolicyConfig as PolicyConfig
from lightning_sdpipe.policies.policy import RefusedEvent as RefusedEvent
