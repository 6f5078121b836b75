import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from isopo_trl.validation import callback


@pytest.fixture(autouse=True)
def curves(request, monkeypatch):
    """A picture takes longer than a validation: where no test looks at it, the callback finds no matplotlib."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(callback, "is_matplotlib_available", lambda: False)


@pytest.fixture
def drawn():
    """The callback draws its curves."""


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, as matplotlib has them."""
    kept, write_png = [], FigureCanvasAgg.print_png

    def keep(canvas, *args, **kwargs):
        kept.append(canvas.figure)
        return write_png(canvas, *args, **kwargs)

    monkeypatch.setattr(FigureCanvasAgg, "print_png", keep)
    return kept
