//! The Python face of pdkv: convert, call, convert back.
//!
//! One class, one file, named as the class. What is deliberately absent: decisions (pdkv-core),
//! byte movement (pdkv-device), threads and sockets (pdkv-engine). Every call into those goes
//! through `enter.rs`; every pointer that Python hands over is in `buffers.rs`.

mod bench;
mod bench_cuda;
mod bench_ucx;
mod blocks;
mod buffers;
mod build;
mod cache;
mod completions;
mod engine;
mod enter;
mod errors;
mod export;
mod issuer;
mod layout;
mod link;
mod lookup;
mod memory;
mod number;
mod path;
mod peer;
mod pipe;
mod plan;
mod pool;
mod probe_cuda;
mod reference;
mod region;
mod shard;
mod sim;
mod span;
mod stats;
mod stream;
mod transfer;
mod ucx;

/// The native part of pdkv. Use the names of the `pdkv` package.
// Every class is frozen and `Sync`, and `tests/python/test_threads.py` shares all of them among threads.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    /// The version of the wheel.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name is Python's")]
    const __version__: &str = crate::build::VERSION;

    #[pymodule_export]
    use crate::bench::{limit_cma, limit_copy, limit_tcp_recv, limit_tcp_send, pattern_fill, pattern_verify};
    #[pymodule_export]
    use crate::bench_cuda::{PyCudaCopy, PyCudaLoop, cache_regions, cuda_count};
    #[pymodule_export]
    use crate::bench_ucx::PyUcxLoop;
    #[pymodule_export]
    use crate::buffers::{buffer_address, dlpack_facts};
    #[pymodule_export]
    use crate::build::build_info;
    #[pymodule_export]
    use crate::cache::PyKvCache;
    #[pymodule_export]
    use crate::completions::PyCompletions;
    #[pymodule_export]
    use crate::engine::PyEngine;
    #[pymodule_export]
    use crate::enter::panic_on_purpose;
    #[pymodule_export]
    use crate::errors::error_kinds;
    #[pymodule_export]
    use crate::export::PyExport;
    #[pymodule_export]
    use crate::issuer::PyIssuer;
    #[pymodule_export]
    use crate::layout::{PyKvLayout, resolve_layout};
    #[pymodule_export]
    use crate::link::PyLink;
    #[pymodule_export]
    use crate::lookup::PyLookupIndex;
    #[pymodule_export]
    use crate::path::{PyPath, transport_names};
    #[pymodule_export]
    use crate::peer::PyPeer;
    #[pymodule_export]
    use crate::pipe::{PyPipeBuffer, PyPipeReceiver, PyPipeSender};
    #[pymodule_export]
    use crate::plan::{PyPlan, plan};
    #[pymodule_export]
    use crate::pool::PyPool;
    #[pymodule_export]
    use crate::probe_cuda::cuda_probe;
    #[pymodule_export]
    use crate::reference::PyReference;
    #[pymodule_export]
    use crate::region::{PyRegion, PyRegionDescriptor};
    #[pymodule_export]
    use crate::shard::PyShard;
    #[pymodule_export]
    use crate::sim::simulate;
    #[pymodule_export]
    use crate::span::PySpan;
    #[pymodule_export]
    use crate::stats::PyTransferStats;
    #[pymodule_export]
    use crate::stream::arrival_stream;
    #[pymodule_export]
    use crate::transfer::PyTransfer;
    #[pymodule_export]
    use crate::ucx::{ucx_candidates, ucx_probe};
}
