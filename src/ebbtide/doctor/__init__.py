"""Examine a machine: facts, measured rates, and findings with remedies.

``facts`` and ``device`` read the machine, ``examine`` combines everything; ``findings`` and ``table`` use facts only.
"""

from ebbtide.doctor.examine import Examination as Examination
from ebbtide.doctor.examine import examine as examine
