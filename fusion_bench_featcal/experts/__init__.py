"""Sources of weights, and experts with one block at a time in memory."""

from fusion_bench_featcal.experts.expert import LazyModel as LazyModel
from fusion_bench_featcal.experts.expert import meta_copy as meta_copy
from fusion_bench_featcal.experts.expert import names_under as names_under
from fusion_bench_featcal.experts.expert import set_module_tensor as set_module_tensor
from fusion_bench_featcal.experts.source import ExpertSource as ExpertSource
from fusion_bench_featcal.experts.source import InMemoryExpert as InMemoryExpert
from fusion_bench_featcal.experts.source import SourceView as SourceView
from fusion_bench_featcal.experts.source import source_of as source_of
