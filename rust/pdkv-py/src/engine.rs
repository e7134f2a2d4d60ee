//! The transfer engine of this process.

use std::sync::Arc;
use std::time::Duration;

use pdkv_core::config::NodeConfig;
use pdkv_core::id::Incarnation;
use pdkv_core::shard::Shard;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{DeviceRegion, Gpu};
use pdkv_device::{HostRegion, HugePages, Memory};
use pdkv_engine::{Engine, EngineConfig};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::cache::PyKvCache;
use crate::completions::PyCompletions;
use crate::enter;
use crate::errors;
use crate::memory::{self, Facts};
use crate::number;
use crate::peer::PyPeer;
use crate::pipe::PyPipeReceiver;
use crate::pool::PyPool;
use crate::reference;
use crate::region::PyRegion;
use crate::shard::PyShard;
use crate::ucx;

/// An engine and the defaults that its Python face adds; every object made by it keeps it.
#[derive(Clone)]
pub(crate) struct Handle {
    pub(crate) engine: Engine,
    /// The lease of an export that names none.
    pub(crate) lease: Duration,
}

/// One transfer engine: registers memory, exports KV blocks, connects to peers, moves bytes.
///
/// All waiting happens in its own threads. Use it from any thread; close it, or leave its `with` block,
/// to stop what is running and to tell the peers.
///
/// Args:
///     name: How peers know this engine.
///     listen: `"host:port"` to accept peers at, port 0 for any; `None` only connects.
///     transports: Names of the transports to use, best first: `"inproc"`, `"cuda"`, `"shm"`, `"cma"`, `"tcp"`, `"ucx"`. By
///         default all, but `"ucx"` only where this host has RDMA devices.
///     threads: Threads that copy.
///     tcp_streams: Data streams of one transfer by `tcp`; all transfers from a peer share at most 64.
///     insecure: Listen beyond loopback although the control channel is neither encrypted nor
///         authenticated in this release.
///     heartbeat_s: How often an idle connection says that it is alive.
///     peer_timeout_s: Silence after which a peer counts as lost.
///     lease_s: The lease of an export that names none; 30 s by default, 3600 s at most.
///     max_claim_s: The longest that one transfer of a peer may keep blocks of this engine pinned, whatever its `timeout_s`;
///         120 s by default. A transfer that takes longer ends as a `TransferTimeoutError`.
///     ucx: Settings of the `ucx` transport, a `UcxConfig`.
///     staging_bytes: Bytes of pinned host memory for each GPU through which its memory goes by `tcp`, at most: 64 MiB by
///         default, half to send from and half to receive into, taken in steps of 4 MiB as transfers need it. 32 pages (128 KiB
///         on most machines) are the least, and 0 has such transfers refused.
///     staging_patience_s: How long a peer may keep a step of that waiting, by not reading or not sending, while others wait
///         for one; then its transfer ends as a `TransferTimeoutError`. 30 s by default.
///     verify_copies: Read back what a GPU of this engine has copied, by `cuda` or to and from pinned memory by `tcp`, and
///         compare its checksums with those of what was read; wrong bytes end the transfer as an `IntegrityError`.
///
/// Raises:
///     ConfigError: A setting is bad; names it and the accepted values.
#[pyclass(name = "Engine", module = "pdkv", frozen, weakref)]
pub(crate) struct PyEngine(pub(crate) Arc<Handle>);

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(signature = (
        name, *, listen="127.0.0.1:0".to_owned(), transports=None, threads=None, tcp_streams=None, insecure=false,
        heartbeat_s=None, peer_timeout_s=None, lease_s=None, max_claim_s=None, ucx=None,
        staging_bytes=None, staging_patience_s=None, verify_copies=false,
    ), text_signature = "(name, *, listen='127.0.0.1:0', transports=None, threads=None, tcp_streams=None, \
        insecure=False, heartbeat_s=None, peer_timeout_s=None, lease_s=None, max_claim_s=None, ucx=None, \
        staging_bytes=None, staging_patience_s=None, verify_copies=False)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        name: &str,
        listen: Option<String>,
        #[pyo3(from_py_with = transports)] transports: Option<Vec<String>>,
        #[pyo3(from_py_with = number::threads)] threads: Option<usize>,
        #[pyo3(from_py_with = number::tcp_streams)] tcp_streams: Option<usize>,
        insecure: bool,
        #[pyo3(from_py_with = number::optional_seconds)] heartbeat_s: Option<f64>,
        #[pyo3(from_py_with = number::optional_seconds)] peer_timeout_s: Option<f64>,
        #[pyo3(from_py_with = number::optional_seconds)] lease_s: Option<f64>,
        #[pyo3(from_py_with = number::optional_seconds)] max_claim_s: Option<f64>,
        ucx: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::staging_bytes)] staging_bytes: Option<u64>,
        #[pyo3(from_py_with = number::optional_seconds)] staging_patience_s: Option<f64>,
        verify_copies: bool,
    ) -> PyResult<Self> {
        let mut config = EngineConfig {
            listen,
            insecure,
            verify_copies,
            ..EngineConfig::default()
        };
        if let Some(names) = transports {
            config.transports = Some(enter::attached(py, || names.iter().map(|name| name.parse()).collect())?);
        }
        config.ucx = ucx::config(py, ucx, config.transports.as_deref())?;
        config.threads = threads.unwrap_or(config.threads);
        config.staging_bytes = staging_bytes.unwrap_or(config.staging_bytes);
        config.tcp_streams = tcp_streams.unwrap_or(config.tcp_streams);
        config.heartbeat = enter::timeout(py, "heartbeat_s", heartbeat_s)?.unwrap_or(config.heartbeat);
        config.peer_timeout = enter::timeout(py, "peer_timeout_s", peer_timeout_s)?.unwrap_or(config.peer_timeout);
        let patience = enter::timeout(py, "staging_patience_s", staging_patience_s)?;
        config.staging_patience = patience.unwrap_or(config.staging_patience);
        config.max_claim = enter::timeout(py, "max_claim_s", max_claim_s)?.unwrap_or(config.max_claim);
        let lease = enter::duration(py, "lease_s", lease_s.unwrap_or(30.0))?;
        enter::attached(py, || NodeConfig::default().check_lease(lease, "lease_s"))?;
        let engine = enter::detached(py, || Engine::new(name, config))?;
        Ok(Self(Arc::new(Handle { engine, lease })))
    }

    /// How peers know this engine.
    #[getter]
    fn name(&self) -> &str {
        self.0.engine.name()
    }

    /// `"host:port"` a peer can connect to, or `None` when it does not listen.
    #[getter]
    fn address(&self) -> Option<&str> {
        self.0.engine.address()
    }

    /// This life of the engine, in hexadecimal; another one after a restart.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.engine.incarnation().to_string()
    }

    /// The connected peers: `(name, whether this engine connected to it)` of each.
    #[getter]
    fn peers(&self, py: Python<'_>) -> PyResult<Vec<(String, bool)>> {
        enter::detached(py, || Ok(self.0.engine.peers()))
    }

    /// Counters: what the engine has done and holds.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = enter::detached(py, || Ok(self.0.engine.stats()))?;
        let counters = PyDict::new(py);
        counters.set_item("peers", stats.peers)?;
        counters.set_item("live_exports", stats.live_exports)?;
        counters.set_item("live_claims", stats.live_claims)?;
        counters.set_item("parked_claims", stats.parked_claims)?;
        counters.set_item("live_transfers", stats.live_transfers)?;
        counters.set_item("notifications_dropped", stats.notifications_dropped)?;
        Ok(counters)
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.engine.closed()
    }

    /// Registers memory for raw reads and writes, of the host or of a GPU.
    ///
    /// For a tensor on a GPU it waits for what its owner has under way on it: on torch's current stream, or on the stream
    /// that the tensor's protocol names.
    ///
    /// Args:
    ///     tensor: A tensor, buffer or pool without gaps: of torch, or by `__cuda_array_interface__`,
    ///         `__array_interface__`, `__dlpack__` or the buffer protocol.
    ///     name: A name for messages.
    ///     adopt: Move the memory into shared memory in place, so that peers on this host reach it
    ///         directly. Nobody may write it during the call. Refused with the reason where that is not safe.
    ///     raw_access: Whether peers may read and write it; by default they may unless it is read-only.
    ///
    /// Raises:
    ///     RegionError: The memory can't be registered (or adopted); says why.
    ///     LayoutError: It has gaps, or is empty or masked.
    ///     UnsupportedError: It is on a device that pdkv does not reach, or no memory at all.
    ///     DeviceError: The CUDA driver fails.
    #[pyo3(signature = (tensor, *, name=None, adopt=false, raw_access=None))]
    fn register(
        &self,
        tensor: &Bound<'_, PyAny>,
        name: Option<&str>,
        adopt: bool,
        raw_access: Option<bool>,
    ) -> PyResult<PyRegion> {
        let py = tensor.py();
        let (memory, readonly) = memory::tensor(py, &Facts::of(tensor)?, adopt)?;
        let raw_access = enter::attached(py, || writable_by_peers(raw_access, readonly))?;
        let engine = &self.0.engine;
        let region = enter::detached(py, || engine.register(memory, name, raw_access))?;
        Ok(PyRegion::new(region, readonly, tensor.clone().unbind()))
    }

    /// Registers the KV cache of a model, all of it on the host or all of it on one GPU.
    ///
    /// For tensors on a GPU it waits for what their owner has under way on them, as `register` does.
    ///
    /// Args:
    ///     tensors: A mapping from layer name to a tensor or a `(keys, values)` pair, in model order; a
    ///         list of those; or one tensor with an `L` axis.
    ///     layout: Axes such as `"BHNC"`, or a layout name of vLLM's. Strides are honoured.
    ///     block_tokens: Tokens a block holds.
    ///     shard: Which part of the model this is; the whole model by default.
    ///     model: Name of the model; caches of differently named models do not mix.
    ///     adopt: As for `register`.
    ///
    /// Raises:
    ///     LayoutError: A tensor contradicts the layout.
    ///     RegionError: The memory can't be registered (or adopted), or lies in several places; says why.
    ///     UnsupportedError: It is on a device that pdkv does not reach.
    ///     DeviceError: The CUDA driver fails.
    #[pyo3(signature = (tensors, *, layout=None, block_tokens=16, shard=None, model="", adopt=false))]
    fn register_kv_cache(
        &self,
        tensors: &Bound<'_, PyAny>,
        layout: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::block_tokens)] block_tokens: u32,
        shard: Option<&Bound<'_, PyShard>>,
        model: &str,
        adopt: bool,
    ) -> PyResult<PyKvCache> {
        let py = tensors.py();
        let default = pyo3::intern!(py, "BHNC").as_any();
        let found = memory::cache(tensors, layout.unwrap_or(default), block_tokens, adopt)?;
        let shard = shard.map_or_else(
            || Shard::whole(found.layout.num_layers(), found.layout.num_heads()),
            |shard| shard.get().0.clone(),
        );
        let readonly = found.readonly;
        let device = found.memory.first().and_then(memory::device_of);
        let engine = &self.0.engine;
        let cache = enter::detached(py, || {
            engine.register_kv_cache(found.memory, found.layout, shard, model)
        })?;
        Ok(PyKvCache::new(cache, &self.0, readonly, device))
    }

    /// Allocates memory that peers on this host reach directly.
    ///
    /// Args:
    ///     nbytes: Number of bytes.
    ///     huge_pages: Use huge pages if the system has any to give; for host memory only.
    ///     device: Where: `"cpu"`, `"cuda:0"` and so on, or `"cuda"` for the first GPU; a `torch.device` will do.
    ///
    /// Raises:
    ///     CapacityError: There is not enough memory.
    ///     ConfigError: `device` names none.
    ///     UnsupportedError: There is no CUDA driver, or it finds no GPU.
    ///     DeviceError: There is no such GPU, or it has not enough memory.
    #[staticmethod]
    #[pyo3(signature = (nbytes, *, huge_pages=true, device=None))]
    fn allocate(
        py: Python<'_>,
        #[pyo3(from_py_with = number::allocation)] nbytes: u64,
        huge_pages: bool,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyPool> {
        let huge = if huge_pages { HugePages::Try } else { HugePages::Never };
        let name = device.map(|device| device.str()?.extract::<String>()).transpose()?;
        let memory = enter::detached(py, || match memory::parse(name.as_deref())? {
            None => HostRegion::allocate(nbytes, huge).map(Memory::Host),
            Some(ordinal) => DeviceRegion::allocate(&Gpu::open(ordinal)?, nbytes).map(Memory::Device),
        })?;
        Ok(PyPool::new(memory))
    }

    /// Connects to a peer. Each call makes a connection of its own.
    ///
    /// Args:
    ///     address: `"host:port"` where the peer listens.
    ///     timeout_s: The longest to try.
    ///
    /// Raises:
    ///     PeerUnreachableError: Nobody answers.
    ///     HandshakeError: The peer speaks another protocol; lists every difference.
    #[pyo3(signature = (address, *, timeout_s=5.0))]
    fn connect(
        &self,
        py: Python<'_>,
        address: &str,
        #[pyo3(from_py_with = number::seconds)] timeout_s: f64,
    ) -> PyResult<PyPeer> {
        let timeout = enter::duration(py, "timeout_s", timeout_s)?;
        let (engine, address) = (self.0.engine.clone(), address.to_owned());
        let peer = enter::interruptible(py, move || engine.connect(&address, timeout))?;
        Ok(PyPeer::new(peer, &self.0))
    }

    /// The connection to the engine that issued a reference.
    ///
    /// Raises:
    ///     ReferenceRestartedError: That engine was restarted since.
    ///     PeerUnreachableError: There is no connection to it.
    fn peer_for(&self, py: Python<'_>, reference: &Bound<'_, PyAny>) -> PyResult<PyPeer> {
        let reference = reference::read(reference)?;
        let peer = enter::detached(py, || self.0.engine.peer_for(&reference))?;
        Ok(PyPeer::new(peer, &self.0))
    }

    /// Accepts the oldest pipe of this name that a connected peer has opened with `Peer.open_pipe`.
    ///
    /// Args:
    ///     channel: The name.
    ///     incarnation: Only from this life of an engine; by default from whoever comes.
    ///     max_item_bytes: A tensor of more bytes ends the pipe with a `CapacityError` at both ends; by default the
    ///         memory of this host is the limit.
    ///     timeout_s: The longest to wait; `None` waits for ever.
    ///
    /// Raises:
    ///     TransferTimeoutError: None came in time.
    ///     ConfigError: The incarnation is none.
    ///     ClosedError: The engine is closed.
    #[pyo3(signature = (channel, *, incarnation=None, max_item_bytes=None, timeout_s=None))]
    fn accept_pipe(
        &self,
        py: Python<'_>,
        channel: &[u8],
        incarnation: Option<&str>,
        #[pyo3(from_py_with = number::max_item_bytes)] max_item_bytes: Option<u64>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<PyPipeReceiver> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        let life = enter::attached(py, || incarnation.map(read_incarnation).transpose())?;
        let engine = &self.0.engine;
        let accept = |wait| engine.accept_pipe(channel, life, max_item_bytes.unwrap_or(u64::MAX), wait);
        let Some(pipe) = enter::awaited(py, timeout, || Ok(None), accept)? else {
            let text = format!("nobody has opened the pipe `{}`", String::from_utf8_lossy(channel));
            return Err(errors::to_python(
                py,
                &Error::new(ErrorKind::TransferTimeout, "accept_pipe", text),
            ));
        };
        Ok(PyPipeReceiver::new(pipe, &self.0))
    }

    /// Takes the notifications that arrived: `(peer name, bytes)` of each, oldest first.
    fn notifications<'py>(&self, py: Python<'py>) -> Vec<(String, Bound<'py, PyBytes>)> {
        let arrived = self.0.engine.notifications();
        arrived
            .into_iter()
            .map(|(name, bytes)| (name, PyBytes::new(py, &bytes)))
            .collect()
    }

    /// Returns the transfers that end from now on, for an event loop. Each call's has a descriptor and ids of its own.
    ///
    /// Raises:
    ///     CapacityError: The process has no descriptor left.
    ///     ClosedError: The engine is closed.
    fn completions(&self, py: Python<'_>) -> PyResult<PyCompletions> {
        enter::attached(py, || self.0.engine.completions()).map(PyCompletions::new)
    }

    /// Takes the export ids, in hexadecimal, of the exports and offers that ended since the last call and whose blocks may
    /// be reused. They are collected from the first call on, or from the first `KvCache.issuer()`; the last 131,072 are kept.
    fn take_ended(&self) -> Vec<String> {
        let ended = self.0.engine.take_ended();
        ended.into_iter().map(|id| id.to_string()).collect()
    }

    /// Stops what is running and tells the peers. Waits, for a few seconds at most, until this engine's transfers and
    /// the writers of its offers are out of the memory. Closing twice is fine: who closes while another thread does waits for the end
    /// and gets the same answer.
    ///
    /// Returns:
    ///     Whether they are. If not, a warning is logged too, by `pdkv.engine`: let the memory be as long as the peers live. A
    ///     peer that has raw access or reads an export is not waited for: it goes on until it has heard of the end. `False`
    ///     in a fork of the engine's process, where it does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<bool> {
        let first = !self.0.engine.closed();
        let quiet = enter::detached(py, || Ok(self.0.engine.close()))?;
        // In a fork the engine is never closed.
        if first && !quiet && self.0.engine.closed() {
            let text = "engine `%s` is closed, but a peer or a copy may still touch its memory: don't reuse it yet";
            py.import(pyo3::intern!(py, "logging"))?
                .call_method1(pyo3::intern!(py, "getLogger"), ("pdkv.engine",))?
                .call_method1(pyo3::intern!(py, "warning"), (text, self.name()))?;
        }
        Ok(quiet)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py).map(|_quiet| ())
    }

    fn __repr__(&self) -> String {
        let address = self.0.engine.address().unwrap_or("not listening");
        format!("<pdkv.Engine {} ({address})>", self.0.engine.name())
    }
}

fn read_incarnation(text: &str) -> Result<Incarnation> {
    Incarnation::from_hex(text).ok_or_else(|| {
        Error::new(ErrorKind::Config, "incarnation", format!("`{text}` is no incarnation"))
            .with_hint("32 hexadecimal digits, as `peer.incarnation` gives them")
    })
}

/// Reads names of transports. To Python a lone name is a sequence of letters too.
fn transports(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<String>>> {
    let py = object.py();
    if let Ok(name) = object.cast::<PyString>() {
        let error = Error::new(
            ErrorKind::Config,
            "transports",
            "`transports` is one string, not a list of names",
        )
        .with_hint(format!("write `transports=[{}]`", name.repr()?));
        return Err(errors::to_python(py, &error));
    }
    object.extract().map_err(|source| {
        let error = Error::new(
            ErrorKind::Config,
            "transports",
            format!("`transports` is no list of names: {source}"),
        )
        .with_hint("write names such as `transports=[\"shm\", \"tcp\"]`");
        errors::to_python(py, &error)
    })
}

fn writable_by_peers(wish: Option<bool>, readonly: bool) -> Result<bool> {
    if wish == Some(true) && readonly {
        return Err(Error::new(
            ErrorKind::Region,
            "register",
            "the memory is read-only but peers would be let write it",
        )
        .with_hint("leave `raw_access` out: read-only memory can be the source of this engine's own writes"));
    }
    Ok(wish.unwrap_or(!readonly))
}
