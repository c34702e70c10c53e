"""The model: its blocks, its wrappers, and the hooks around the blocks."""

from ebbtide.wrap.attach import Attachment as Attachment
from ebbtide.wrap.blocks import find_blocks as find_blocks
from ebbtide.wrap.strategy import STRATEGY_NAMES as STRATEGY_NAMES
from ebbtide.wrap.strategy import check_strategy as check_strategy
from ebbtide.wrap.strategy import weights_move as weights_move
