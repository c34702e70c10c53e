"""Looks at a machine and says what it allows: facts, what they mean, and findings with what to do.

``facts`` and ``device`` read the machine, ``examine`` joins all; ``findings`` and ``table`` know only plain facts.
"""

from ebbtide.doctor.examine import Examination as Examination
from ebbtide.doctor.examine import examine as examine
