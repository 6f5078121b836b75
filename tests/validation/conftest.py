import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, as matplotlib has them."""
    kept, write_png = [], FigureCanvasAgg.print_png

    def keep(canvas, *args, **kwargs):
        kept.append(canvas.figure)
        return write_png(canvas, *args, **kwargs)

    monkeypatch.setattr(FigureCanvasAgg, "print_png", keep)
    return kept
