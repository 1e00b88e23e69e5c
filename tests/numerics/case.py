"""A test case: everything that determines one call, as plain values that survive JSON."""
import dataclasses
import json
from typing import List, Optional, Tuple


DTYPES = ("f32", "f16", "bf16")

# Fields that by default are as another.
FOLLOWED = {"heads_kv": "heads_q", "dim_v": "dim_qk", "dtype_kv": "dtype", "dtype_o": "dtype",
            "dtype_grad": "usual_grad"}


@dataclasses.dataclass
class Case:
    # Sizes: capacities where lens_* say less; varlen: the longest of cu_*.
    batch: int = 1
    seqlen_q: int = 5
    seqlen_kv: int = 5
    heads_q: int = 1
    heads_kv: int = 0            # 0: as heads_q
    dim_qk: int = 8
    dim_v: int = 0               # 0: as dim_qk
    dtype: str = "f32"
    dtype_kv: str = ""           # "": as dtype
    dtype_o: str = ""            # "": as dtype
    dtype_grad: str = ""         # "": as dtype, or as dtype_o where that is f8
    descales: Optional[str] = None  # what they do not broadcast over: batch, head, token
    descale_block: int = 0
    descale_dim: int = 0         # > 0: LATENT_KV
    scale_o: bool = False
    amax_o: Optional[str] = None  # what it is not the largest of: batch, head
    backward: bool = False
    lse: bool = True

    # Layout.
    cu_q: Optional[List[int]] = None      # rows of each sequence: VARLEN_Q
    cu_kv: Optional[List[int]] = None     # likewise: VARLEN_KV
    lens_q: Optional[List[int]] = None
    lens_kv: Optional[List[int]] = None
    starts_kv: Optional[List[int]] = None  # left padding
    page_size: int = 0                    # > 0: PAGED_KV
    strides: str = "packed"               # packed bshd bhsd sbhd qkv padded broadcast record
    v_in_k: bool = False                  # V is the first elements of K's rows: latent attention

    # Masks.
    causal: bool = False
    window: Optional[Tuple[int, int]] = None
    chunk: int = 0
    top_left: bool = False
    blocks: Optional[Tuple[int, int]] = None
    block_dims: str = "bh"                # what the block mask does not broadcast over
    block_lists: str = ""                 # padded ends rows: see block_lists.py
    block_lens: Optional[str] = None      # what lengths of blocks do not broadcast over
    tree: int = 0                         # keys that bits show or hide
    tree_dims: str = "br"                 # what the bits do not broadcast over: batch, row
    density: float = 0.5                  # of block masks, boolean masks and the bits of trees
    hidden: Optional[float] = None        # share of pages that are hidden: PAGES

    # Features.
    scale: float = 0.0
    softcap: float = 0.0
    alibi: str = ""                       # "h" or "bh"
    steepest: float = 0.5                 # of the slopes of ALiBi
    bias: str = ""                        # dtype of the dense bias; "u8": boolean mask
    bias_dims: str = "bhr"                # what the bias does not broadcast over: batch, head, row
    bias_empty: float = 0.0               # share of rows that the bias hides altogether
    sink: bool = False
    dropout: float = 0.0
    rng: Tuple[int, int] = (0x1234567890ABCDEF, 0x0FEDCBA987654321)
    rng_device: bool = False              # half of the seed through rng_device
    dlse: bool = False
    dbias: Optional[str] = None           # what is not summed over, like bias_dims
    dsink: bool = False

    # How.
    splits: int = 0
    threads: int = 0
    determinism: int = 0
    amplitude: float = 1.0                # factor of q and k
    seed: int = 0

    def __post_init__(self):
        self.heads_kv = self.heads_kv or self.heads_q
        self.dim_v = self.dim_v or self.dim_qk
        self.dtype_kv = self.dtype_kv or self.dtype
        self.dtype_o = self.dtype_o or self.dtype
        self.dtype_grad = self.dtype_grad or self.usual_grad
        if self.cu_q is not None:
            self.batch, self.seqlen_q = len(self.cu_q), max(self.cu_q, default=0)
        if self.cu_kv is not None:
            self.batch, self.seqlen_kv = len(self.cu_kv), max(self.cu_kv, default=0)
        for name in ("window", "blocks", "rng"):
            if getattr(self, name) is not None:
                setattr(self, name, tuple(getattr(self, name)))
        self.lse = self.lse or self.backward

    # Rows that a sequence owns, and those of them in use, which begin at its start.
    def capacity_q(self, b):
        return self.cu_q[b] if self.cu_q is not None else self.seqlen_q

    def capacity_kv(self, b):
        return self.cu_kv[b] if self.cu_kv is not None else self.seqlen_kv

    def length_q(self, b):
        return self.lens_q[b] if self.lens_q is not None else self.capacity_q(b)

    def length_kv(self, b):
        end = self.lens_kv[b] if self.lens_kv is not None else self.capacity_kv(b)
        return end - self.start_kv(b)

    def start_kv(self, b):
        return self.starts_kv[b] if self.starts_kv is not None else 0

    @property
    def usual_grad(self):
        return self.dtype_o if self.dtype == "f8" else self.dtype

    @property
    def columns_k(self):
        """Elements of a row of k."""
        return self.dim_qk - self.dim_v if self.descale_dim else self.dim_qk

    @property
    def latent_descales(self):
        return -(-self.dim_v // self.descale_dim)

    @property
    def compute(self):
        """The type whose naive arithmetic the results are held to: 8 bits are widened."""
        return "f32" if self.dtype == "f8" else self.dtype

    @property
    def group(self):
        return self.heads_q // self.heads_kv

    @property
    def scale_used(self):
        return self.scale or self.dim_qk ** -0.5

    def replace(self, **changes):
        """A copy; what followed another field by default follows its new value."""
        for name, leader in FOLLOWED.items():
            if getattr(self, name) == getattr(self, leader):
                changes.setdefault(name, type(getattr(self, name))())
        return dataclasses.replace(self, **changes)

    def to_json(self):
        """The fields that differ from their defaults, as one line."""
        changed = {}
        for field in dataclasses.fields(Case):
            value = getattr(self, field.name)
            usual = getattr(self, FOLLOWED[field.name]) if field.name in FOLLOWED \
                else field.default
            if value != usual:
                changed[field.name] = value
        return json.dumps(changed, separators=(",", ":"))

    @staticmethod
    def from_json(text):
        return Case(**json.loads(text))
