"""The report of a run: measured facts, tables and plots.

It may import from callbacks and what callbacks may import from.
"""

from lightning_axosparse.support.troubleshooting import require_cli

require_cli("The report of a run")
