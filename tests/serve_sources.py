"""Sources of a tiny vLLM that takes `vllm serve` arguments, for the doctor: three kinds of release, in our own words.

`files(...)` gives {name: text}; `write(folder, ...)` puts them where the probe reads them.
"""

OPTIONS = """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        model_kwargs = get_kwargs(ModelConfig)
        parallel_kwargs = get_kwargs(ParallelConfig)
        cache_kwargs = get_kwargs(CacheConfig)
        attention_kwargs = get_kwargs(AttentionConfig)
        vllm_kwargs = get_kwargs(VllmConfig)
        group = parser.add_argument_group()
        group.add_argument("--model", **model_kwargs["model"])
        group.add_argument("--served-model-name", **model_kwargs["served_model_name"])
        group.add_argument("--max-model-len", **model_kwargs["max_model_len"])
        group.add_argument("--enforce-eager", **model_kwargs["enforce_eager"])
        group.add_argument("--hf-overrides", **model_kwargs["hf_overrides"])
        group.add_argument("--hf-token", **model_kwargs["hf_token"])
        group.add_argument("--tensor-parallel-size", "-tp", **parallel_kwargs["tensor_parallel_size"])
        group.add_argument("--decode-context-parallel-size", "-dcp", **parallel_kwargs["decode_context_parallel_size"])
        group.add_argument(
            "--prefill-context-parallel-size", "-pcp", **parallel_kwargs["prefill_context_parallel_size"]
        )
        group.add_argument("--dcp-comm-backend", **parallel_kwargs["dcp_comm_backend"])
        group.add_argument("--kv-cache-dtype", **cache_kwargs["cache_dtype"])
        group.add_argument("--attention-backend", **attention_kwargs["backend"])
        group.add_argument("--attention-config", "-ac", **vllm_kwargs["attention_config"])
        group.add_argument("--compilation-config", "-cc", **vllm_kwargs["compilation_config"])
        group.add_argument("--optimization-level", type=int)
        group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
"""

CLASSES = """
CommBackend = Literal["ag_rs", "a2a"]

class ModelConfig:
    model: str = "m"
    served_model_name: str | list[str] | None = None
    max_model_len: int | None = None
    enforce_eager: bool = False
    hf_overrides: dict[str, Any] | Callable = field(default_factory=dict)
    hf_token: bool | str | None = None

class ParallelConfig:
    tensor_parallel_size: int = Field(default=1, ge=1)
    decode_context_parallel_size: int = Field(default=1, ge=1)
    prefill_context_parallel_size: int = Field(default=1, ge=1)
    dcp_comm_backend: CommBackend | None = None

class CacheConfig:
    cache_dtype: CacheDType = "auto"

class AttentionConfig:
    backend: AttentionBackendEnum | None = None
    sparse_mla_force_mqa: bool = False

class VllmConfig:
    attention_config: AttentionConfig = None
    compilation_config: CompilationConfig = None
"""

FRONTEND = """
class BaseFrontendArgs:
    chat_template: str | None = None
    enable_prompt_tokens_details: bool = False

class FrontendArgs(BaseFrontendArgs):
    host: str | None = None
    port: int = 8000
    middleware: list[str] = []

def make_arg_parser(parser):
    parser.add_argument("model_tag", type=str, nargs="?")
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--config")
"""

REGISTRY = """
class AttentionBackendEnum(Enum):
    FLASHMLA_SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
    FLASHINFER_MLA_SPARSE = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse.FlashInferBackend"
    FLASHMLA = "vllm.v1.attention.backends.mla.flashmla.FlashMLABackend"
    TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla.TritonBackend"
    ROCM_AITER_MLA_SPARSE = "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse.RocmBackend"
"""

BACKEND = """
class Backend:
    supported_kv_cache_dtypes = ["auto", "fp8_ds_mla", "fp8"]
    @staticmethod
    def get_impl_cls():
        return Impl

class FlashMLASparseBackend(Backend): pass
"""
NO_LSE = BACKEND + "class Impl:\n    pass\n"
NEWER = (
    BACKEND
    + """
MIN_HEADS_FOR_BF16_PREFILL = 32
class Builder:
    if decode_context_parallel_size > 1:
        self.pcp_dcp_kv_gather = True
class Impl:
    can_return_lse_for_decode: bool = True
"""
)
AG_RS_ONLY = NEWER + "if parallel_config.dcp_comm_backend != 'ag_rs':\n    raise NotImplementedError\n"
FLASHINFER = """
class Base:
    supported_kv_cache_dtypes = ["auto", "fp8"]
    @staticmethod
    def get_impl_cls():
        return Impl

class FlashInferBackend(Base):
    def supports_combination(cls):
        return "this one does not support combined PCP+DCP"

class Impl:
    can_return_lse_for_decode = True
"""
TRITON = """
class TritonBackend:
    @classmethod
    def supports_batch_invariance(cls):
        return True
"""
GLM_A2A = "class GlmMoeDsaForCausalLM(Base):\n    set_dcp_defaults(comm_backend='a2a')\n\nclass Next(Base):\n    pass\n"
PCP = """
if parallel_config.decode_context_parallel_size > 1 and not is_sparse_mla:
    raise NotImplementedError
if (
    is_sparse_mla
    and parallel_config.decode_context_parallel_size == 1
    and cudagraph_mode != CUDAGraphMode.NONE
):
    raise NotImplementedError
if (
    parallel_config.decode_context_parallel_size > 1
    and parallel_config.dcp_comm_backend != "ag_rs"
):
    raise NotImplementedError
"""


def files(sparse=NEWER, **changes) -> dict[str, str]:
    """{name: text} of a release with this FLASHMLA_SPARSE; `changes` replace whole files, None leaves one out."""
    mla = "vllm/v1/attention/backends/mla"
    made = {
        "options": ("vllm/engine/arg_utils.py", OPTIONS),
        "classes": ("vllm/config/classes.py", CLASSES),
        "frontend": ("vllm/entrypoints/common/cli_args.py", FRONTEND),
        "registry": ("vllm/v1/attention/backends/registry.py", REGISTRY),
        "sparse": (f"{mla}/flashmla_sparse.py", sparse),
        "flashinfer": (f"{mla}/flashinfer_mla_sparse.py", FLASHINFER),
        "triton": (f"{mla}/triton_mla.py", TRITON),
        "models": ("vllm/model_executor/models/config.py", GLM_A2A),
        "pcp": ("vllm/v1/worker/gpu/pcp_manager.py", PCP),
    }
    made |= {name: (made[name][0], text) for name, text in changes.items()}
    return {name: text for name, text in made.values() if text is not None}


def write(folder, *arguments, **changes):
    """The folder, with those files in it."""
    for name, text in files(*arguments, **changes).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
