"""`SpeechTaskPool`: speech models, scored by the words of their transcripts."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoProcessor

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.data.speech import Speech, SpeechBatches, read_speech
from fusion_bench_featcal.data.tables import parent_folder
from fusion_bench_featcal.data.text_limits import end_tokens, positions_of
from fusion_bench_featcal.data.text_samples import Seq2SeqTextEncoder
from fusion_bench_featcal.data.transcripts import TranscriptScorer
from fusion_bench_featcal.fusionbench.processors import load_part
from fusion_bench_featcal.tasks.item_pool import ItemPool, open_rows


class SpeechTaskPool(ItemPool, BaseTaskPool):
    """Evaluates speech models on sounds and what is said in them.

    `accuracy` is the word accuracy of `TranscriptScorer`: 1 - word error rate of greedy
    transcripts, at least 0. Tasks have no `item_correct`. `loss` is the cross-entropy per
    target token, averaged over examples.
    """

    _config_mapping = BaseTaskPool._config_mapping | {
        "_test_datasets": "test_datasets",
        "_processor": "processor",
        "batch_size": "batch_size",
    }

    def __init__(
        self,
        test_datasets: Mapping[str, Any] | None = None,
        *,
        processor: object,
        batch_size: int = 16,
        **unknown: object,
    ) -> None:
        """Check the settings. `opened` loads data and processor.

        Args:
            test_datasets: Task name -> rows, a path, a hub id or a configuration with `_target_`.
                Rows have `audio` and `text`. By default the model pool's.
            processor: Feature extractor and tokenizer: a folder, a hub id, a configuration or the
                object.
            batch_size: Sounds that are transcribed at once.
            **unknown: Refused, except for keys that all FusionBench configurations have.

        Raises:
            ValueError: For unknown keys, and values that are not accepted.
        """
        self._check_keys(unknown, batch_size=batch_size)
        super().__init__()
        self._test_datasets, self._processor = test_datasets, processor
        self.batch_size = batch_size

    def _load_processors(self) -> None:
        self.processor = load_part("taskpool.processor", self._processor, AutoProcessor)

    def _open(self, task: str, rows: object, setting: str) -> list[Speech]:
        home, opened = parent_folder(rows), open_rows(task, rows, setting)
        return [read_speech(opened, index, home) for index in range(len(opened))]

    def _score(self, model: Any, task: str) -> Score:
        rows, processor = self.test_dataloaders[task], self.processor
        limits = positions_of(model), end_tokens(model)
        encoder = Seq2SeqTextEncoder(processor.tokenizer, None, *limits)
        start = model.config.decoder_start_token_id
        batches = SpeechBatches(rows, processor.feature_extractor, encoder, start)
        with self.fabric.autocast():
            return TranscriptScorer(batches, self.batch_size).score(model)
