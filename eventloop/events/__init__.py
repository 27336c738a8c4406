"""Define the events: immutable records of what happened in a run, without tensors or trainers.

Start with `types`, which defines most events and their fields; `health` defines the events that report
failures and slow parts. `catalogue` finds events by name, and `codec` encodes them as bytes. The package
imports only `migration` and `util`.
"""

from eventloop.events.base import Counter as Counter
from eventloop.events.base import Event as Event
from eventloop.events.deferred import Timed as Timed
from eventloop.events.health import EventsDropped as EventsDropped
from eventloop.events.health import HandlerFailed as HandlerFailed
from eventloop.events.health import InvalidLoss as InvalidLoss
from eventloop.events.health import LoaderStall as LoaderStall
from eventloop.events.health import SlowHandler as SlowHandler
from eventloop.events.health import SlowRank as SlowRank
from eventloop.events.types import BY_COMMAND as BY_COMMAND
from eventloop.events.types import COMPLETED as COMPLETED
from eventloop.events.types import AfterBackward as AfterBackward
from eventloop.events.types import AfterLoadCheckpoint as AfterLoadCheckpoint
from eventloop.events.types import AfterOptimizerStep as AfterOptimizerStep
from eventloop.events.types import AfterPredict as AfterPredict
from eventloop.events.types import AfterPredictIter as AfterPredictIter
from eventloop.events.types import AfterRun as AfterRun
from eventloop.events.types import AfterTest as AfterTest
from eventloop.events.types import AfterTestEpoch as AfterTestEpoch
from eventloop.events.types import AfterTestIter as AfterTestIter
from eventloop.events.types import AfterTrain as AfterTrain
from eventloop.events.types import AfterTrainEpoch as AfterTrainEpoch
from eventloop.events.types import AfterTrainIter as AfterTrainIter
from eventloop.events.types import AfterVal as AfterVal
from eventloop.events.types import AfterValEpoch as AfterValEpoch
from eventloop.events.types import AfterValIter as AfterValIter
from eventloop.events.types import BatchPredicted as BatchPredicted
from eventloop.events.types import BeforeOptimizerStep as BeforeOptimizerStep
from eventloop.events.types import BeforePredict as BeforePredict
from eventloop.events.types import BeforePredictIter as BeforePredictIter
from eventloop.events.types import BeforeRun as BeforeRun
from eventloop.events.types import BeforeSaveCheckpoint as BeforeSaveCheckpoint
from eventloop.events.types import BeforeTest as BeforeTest
from eventloop.events.types import BeforeTestEpoch as BeforeTestEpoch
from eventloop.events.types import BeforeTestIter as BeforeTestIter
from eventloop.events.types import BeforeTrain as BeforeTrain
from eventloop.events.types import BeforeTrainEpoch as BeforeTrainEpoch
from eventloop.events.types import BeforeTrainIter as BeforeTrainIter
from eventloop.events.types import BeforeVal as BeforeVal
from eventloop.events.types import BeforeValEpoch as BeforeValEpoch
from eventloop.events.types import BeforeValIter as BeforeValIter
from eventloop.events.types import CheckpointEvaluated as CheckpointEvaluated
from eventloop.events.types import CheckpointFailed as CheckpointFailed
from eventloop.events.types import CheckpointSaved as CheckpointSaved
from eventloop.events.types import CommandApplied as CommandApplied
from eventloop.events.types import CommandRefused as CommandRefused
from eventloop.events.types import HistogramLogged as HistogramLogged
from eventloop.events.types import ImageLogged as ImageLogged
from eventloop.events.types import Mode as Mode
from eventloop.events.types import OptimizerStepSkipped as OptimizerStepSkipped
from eventloop.events.types import PreemptionRequested as PreemptionRequested
from eventloop.events.types import RolledBack as RolledBack
from eventloop.events.types import RunInfo as RunInfo
from eventloop.events.types import ScalarsLogged as ScalarsLogged
from eventloop.events.types import StopRequested as StopRequested
from eventloop.events.types import TextLogged as TextLogged
