"""Examines a machine: facts, measured rates, and findings with their remedies.

``facts`` and ``device`` read the machine, ``examine`` joins all; ``findings`` and ``table`` know only plain facts.
"""

from ebbtide.doctor.examine import Examination as Examination
from ebbtide.doctor.examine import examine as examine
