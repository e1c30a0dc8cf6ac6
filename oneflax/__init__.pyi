from . import pipeline as pipeline
from . import sbp as sbp
from .sbp.grid import placement as placement
from .sbp.signature import B as B
from .sbp.signature import P as P
from .sbp.signature import S as S

__version__: str
