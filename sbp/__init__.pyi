from .errors import Fault as Fault
from .errors import FlowError as FlowError
from .errors import PlanError as PlanError
from .errors import SbpError as SbpError
from .errors import ScheduleError as ScheduleError
