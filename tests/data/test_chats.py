"""Chat templates that do not end, or need more than a machine has."""

import resource
import signal

import pytest
from tiny_texts import word_tokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data import templates

MANY = "{% for i in range(99999) %}"
END = "{% endfor %}"
ENDLESS = {
    "{{ 'a' * 10**13 }}": "memory",
    "{{ [0] * 10**13 }}": "memory",
    "{{ 'a'|center(10**13) }}": "memory",
    "{{ '%9999999999999d' % 1 }}": "memory",
    f"{{% set n = namespace(s='a') %}}{MANY}{{% set n.s = n.s ~ n.s %}}{END}": "memory",
    f"{MANY}{MANY}{MANY}{END}{END}{END}": "more than 1 seconds",
    f"{{% set x %}}{MANY}{MANY}{END}{END}{{% endset %}}": "more than 1 seconds",
    f"{MANY}{MANY}{{{{ messages }}}}{END}{END}": "writes more than 10,000,000 characters",
    "{{ messages[0].role * 10**7 }}": "writes more than 10,000,000 characters",
}


@pytest.mark.parametrize("template", ENDLESS)
def test_templates_without_end_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch):
    if "seconds" in ENDLESS[template]:
        monkeypatch.setattr(templates, "_MOST_SECONDS", 1)
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    turns, tokenizer = [{"role": "user", "content": "a b"}], word_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(CalibrationError, match=f"a row: .*cannot be used: .*{ENDLESS[template]}"):
        templates.render(tokenizer, turns, "a row")
    tokenizer.chat_template = "{{ 'a' * 10**6 }}"
    assert len(templates.render(tokenizer, turns, "a row")) == 10**6
    assert limits == (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM))
