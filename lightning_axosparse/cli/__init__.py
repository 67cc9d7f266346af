"""The commands `axosparse-train`, `axosparse-eval`, `axosparse-sweep` and `axosparse-plan`.

It may import from every subpackage.
"""

from lightning_axosparse.support.troubleshooting import require_cli

try:
    require_cli("The command line")
except ModuleNotFoundError as error:
    raise SystemExit(str(error)) from error
