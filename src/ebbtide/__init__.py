"""Train PyTorch models that do not fit: keep, offload or recompute every tensor that autograd saves, bitwise."""

from ebbtide.api import Handle as Handle
from ebbtide.api import enable_activation_offloading as enable_activation_offloading
from ebbtide.api import offload_saved_tensors as offload_saved_tensors
from ebbtide.api import register_recompute as register_recompute
from ebbtide.base.errors import EbbtideError as EbbtideError
from ebbtide.config import Auto as Auto
from ebbtide.config import Inputs as Inputs
from ebbtide.config import Keep as Keep
from ebbtide.config import Minimal as Minimal
from ebbtide.config import Offload as Offload
from ebbtide.engine import Stats as Stats

__version__ = "0.1.0"
