"""Configurations as people write them, made of hand-written parts: each way to train, with each set of the other settings.

One module a tool; ``configs()`` of each yields ``(name, text)``. The parts follow the tools' documented keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def combined(
    models: Sequence[str], methods: Mapping[str, str], settings: Mapping[str, str], data: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Each method with each settings block; models and data blocks in turn."""
    number = 0
    for method, method_text in methods.items():
        for setting, setting_text in settings.items():
            model, rows = models[number % len(models)], data[number % len(data)]
            yield f"{number:02d}-{method}-{setting}", f"{model}{method_text}{rows}{setting_text}"
            number += 1
