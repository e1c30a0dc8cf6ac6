from . import pipeline as pipeline
from . import sbp as sbp

__version__: str
