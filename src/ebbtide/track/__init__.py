"""Listen to events, sample memory, and write one run file; see [Note: record, then report]."""

from ebbtide.track.memory import track_memory as track_memory
from ebbtide.track.runfile import RunFile as RunFile
from ebbtide.track.sampler import MemoryReader as MemoryReader
from ebbtide.track.sampler import Sampler as Sampler
from ebbtide.track.summary import summarise as summarise
from ebbtide.track.summary import write_summary as write_summary
