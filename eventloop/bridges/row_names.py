"""Name the callbacks of another engine for their rows in the costs, the same way in all bridges."""

from __future__ import annotations


class RowNames:
    """Number the callbacks of one class, in the order in which their names are asked for.

        names = RowNames()
        names.of(first, "Timer"), names.of(second, "Timer"), names.of(first, "Timer")
        # ("Timer", "Timer #2", "Timer")

    A bridge makes one for each run, so a callback that is gone leaves no gap. The callbacks are kept alive.
    """

    def __init__(self) -> None:
        self._owners: dict[str, list[object]] = {}

    def of(self, owner: object, name: str, suffix: str = "") -> str:
        """Return a callback's name: that of its class, with a number unless it is the first of that name.

        Args:
            suffix: the end of the row's name; callbacks with different suffixes share no numbers.
        """
        owners = self._owners.setdefault(name + suffix, [])
        if not any(each is owner for each in owners):
            owners.append(owner)
        number = next(index for index, each in enumerate(owners, start=1) if each is owner)
        return name if number == 1 else f"{name} #{number}"
