"""Name the callbacks of another engine in the table of costs. All bridges use this module."""

from __future__ import annotations


class RowNames:
    """Number callbacks of the same name, in the order in which `of` is first called for them.

        names = RowNames()
        names.of(first, "Timer"), names.of(second, "Timer"), names.of(first, "Timer")
        # ("Timer", "Timer #2", "Timer")

    A bridge creates one per run, so a removed callback leaves no gap. It keeps the callbacks alive.
    """

    def __init__(self) -> None:
        self._owners: dict[str, list[object]] = {}

    def of(self, owner: object, name: str, suffix: str = "") -> str:
        """Return `name`, with a number unless the callback `owner` is the first of that name.

        Args:
            suffix: what the caller appends to the name; each suffix is numbered separately.
        """
        owners = self._owners.setdefault(name + suffix, [])
        if not any(known is owner for known in owners):
            owners.append(owner)
        number = next(index for index, known in enumerate(owners, start=1) if known is owner)
        return name if number == 1 else f"{name} #{number}"
