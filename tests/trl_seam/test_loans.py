"""What is borrowed is given back, whatever happens."""

import pytest

from isopo_trl.trl_seam.loans import borrowed, intercepted, results_noted


class Owner:
    one, two = 1, 2

    def method(self, x, y=0):
        return x + y


def test_borrowed_settings_are_given_back():
    owner = Owner()
    owner.one = 10
    with pytest.raises(KeyError), borrowed(owner, one=3, two=4):
        with borrowed(owner, one=5):
            assert (owner.one, owner.two) == (5, 4)
        assert owner.one == 3
        raise KeyError
    assert (owner.one, owner.two) == (10, 2)


def test_intercepted_method_is_as_it_was_afterwards():
    owner, results = Owner(), []
    with pytest.raises(KeyError), intercepted(owner, "method", lambda method, x, y=0: 10 * method(x, y=y)):
        assert owner.method(1, y=2) == 30
        with intercepted(owner, "method", lambda method, x: -method(x)), results_noted(owner, "method", results):
            assert owner.method(1) == -10
        assert owner.method(1) == 10 and results == [-10]
        raise KeyError
    assert owner.method(1) == 1 and "method" not in vars(owner)
