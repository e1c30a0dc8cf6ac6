from . import pipeline as pipeline
from . import sbp as sbp
from .sbp.grid import placement as placement
from .sbp.signature import B as B
from .sbp.signature import P as P
from .sbp.signature import S as S

__version__: str
from ._plan import Plan as Plan
from ._state import TrainState as TrainState
from ._train_step import TrainStep as TrainStep
from .pipeline.markers import stage as stage
from .sbp.errors import FlowError as FlowError
from .sbp.errors import PlanError as PlanError
from .sbp.errors import SbpError as SbpError
from .sbp.errors import ScheduleError as ScheduleError
