"""What a run says to whoever asks: at debug level of the package's logger, on the first rank."""

from __future__ import annotations

import logging

from lightning.fabric.utilities.rank_zero import rank_zero_only

_log = logging.getLogger("lightning_axosparse")


@rank_zero_only
def note(text: str) -> None:
    """Log what users need not know, such as what was chosen for them."""
    _log.debug(text)
