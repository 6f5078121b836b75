"""What is asked of vLLM beside TRL's own settings. The engine itself needs a GPU."""

import pytest

from isopo_trl.trl_seam.vllm import without_texts


@pytest.mark.parametrize("settings", [None, {}, {"seed": 3}, {"stop": None}, {"stop": []}])
def test_no_texts_are_asked_of_vllm(settings):
    assert without_texts(settings) == {**(settings or {}), "detokenize": False}


@pytest.mark.parametrize("settings", [{"stop": ["\n"]}, {"stop": "END"}, {"detokenize": True}])
def test_texts_are_written_where_strings_end_a_completion_or_the_user_says_so(settings):
    assert without_texts(settings) == settings
