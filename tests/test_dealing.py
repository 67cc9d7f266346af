from __future__ import annotations

from lightning_axosparse.dealing import Deal


def test_parts_that_the_user_gave_are_joined_and_others_dealt_anew() -> None:
    deal = Deal(list("abcdef"), [], [range(3), range(3, 4), range(4, 5), range(5, 6)], [1] * 6, "")
    assert deal.among(2).parts == [range(3), range(3, 6)]
    assert deal._replace(given=True).among(2).parts == [range(4), range(4, 6)]
