"""Read run folders and show them; depends on the files only, never on the process that wrote them."""

from ebbtide.report.loading import loading_svg as loading_svg
from ebbtide.report.page import page as page
from ebbtide.report.peak import splits_of as splits_of
from ebbtide.report.run import Run as Run
from ebbtide.report.run import load_run as load_run
from ebbtide.report.story import warnings as warnings
from ebbtide.report.text import as_values as as_values
from ebbtide.report.text import comparison_text as comparison_text
from ebbtide.report.text import text as text
from ebbtide.report.timeline import timeline_svg as timeline_svg
from ebbtide.report.trace import chrome_trace as chrome_trace
from ebbtide.report.verdict import verdicts as verdicts
