"""Define the result of a learning rate range test, which `Trainer.find_lr` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eventloop.util.checks import check_path

FEWEST = 3
"""The least number of iterations in which the loss must fall, so that a learning rate is suggested."""


@dataclass(frozen=True)
class LRCurve:
    """The losses of a learning rate range test, in which the rate rises from iteration to iteration.

    found = trainer.find_lr()
    print(found.suggestion)
    found.plot("lr.html")
    """

    lrs: list[float]
    """The learning rate of each iteration."""
    losses: list[float]
    """The smoothed loss of each iteration."""
    diverged: bool
    """True if the test ended early, because the loss rose far above its lowest value or was not finite."""

    @property
    def suggestion(self) -> float:
        """The learning rate at which the loss falls fastest, before its lowest point.

        ignite's `FastaiLRFinder` and Lightning's `lr_find` choose it in the same way.

        Raises:
            RuntimeError: the loss falls for fewer than three iterations.
        """
        lowest = int(torch.tensor(self.losses).argmin()) if self.losses else 0
        if lowest + 1 < FEWEST:
            raise RuntimeError(
                f"no learning rate is suggested: the loss must fall for at least {FEWEST} iterations, and it "
                f"is lowest in iteration {lowest + 1} of {len(self.losses)}. Lower start_lr, raise end_lr or "
                "iterations, and look at plot(path)"
            )
        # in float32, as in ignite, so that the same slopes count as equal
        falling = torch.tensor(self.losses[: lowest + 1])
        slopes = 0.5 * (falling[2:] - falling[:-2])  # of each loss but the first and the last
        return self.lrs[int(slopes.argmin()) + 1]

    def plot(self, path: str | Path) -> Path:
        """Write the curve, with the suggestion if there is one, as an HTML page, and return its path.

        Raises:
            TypeError, ValueError: `path` is not a path, or does not end with .html.
            ImportError: plotly is not installed.
        """
        check_path("path", path)
        page = Path(path)
        if page.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"path must end with .html, as the plot is an HTML page, got {str(path)!r}")
        try:
            import plotly.graph_objects as go
        except ImportError as error:
            raise ImportError(
                "LRCurve.plot needs plotly: pip install 'torch-eventloop[report]'", name="plotly"
            ) from error
        figure = go.Figure(go.Scatter(x=self.lrs, y=self.losses, name="loss"))
        figure.update_layout(
            title="Learning rate range test",
            xaxis_title="learning rate",
            yaxis_title="smoothed loss",
            xaxis_type="log",
            template="simple_white",
        )
        try:
            rate = self.suggestion
        except RuntimeError:
            pass
        else:
            loss = self.losses[self.lrs.index(rate)]
            marker = {"size": 12, "color": "#d23b3b"}
            figure.add_scatter(
                x=[rate], y=[loss], mode="markers", marker=marker, name=f"suggestion {rate:.2e}"
            )
        figure.write_html(page, include_plotlyjs=True)
        return page
