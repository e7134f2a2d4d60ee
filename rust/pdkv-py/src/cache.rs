//! A registered KV cache: exports and offers its blocks, pulls and pushes them.

use std::sync::Arc;
use std::time::Duration;

use pdkv_core::block_table::BlockTable;
use pdkv_core::{Error, ErrorKind, Result, hex};
use pdkv_engine::{KvCache, PullOptions, Stated};
use pyo3::prelude::*;

use crate::blocks;
use crate::engine::Handle;
use crate::enter;
use crate::export::PyExport;
use crate::issuer::PyIssuer;
use crate::layout::PyKvLayout;
use crate::number;
use crate::peer::PyPeer;
use crate::reference;
use crate::stream::{self, Given};
use crate::transfer::PyTransfer;

/// The KV cache of a model (or a shard of it), registered with an engine.
#[pyclass(name = "KvCache", module = "pdkv", frozen, weakref)]
pub(crate) struct PyKvCache {
    inner: KvCache,
    handle: Arc<Handle>,
    readonly: bool,
    /// The number of the GPU that holds it.
    device: Option<u32>,
}

impl PyKvCache {
    pub(crate) fn new(inner: KvCache, handle: &Arc<Handle>, readonly: bool, device: Option<u32>) -> Self {
        Self {
            inner,
            handle: Arc::clone(handle),
            readonly,
            device,
        }
    }

    fn writable(&self, operation: &'static str) -> Result<()> {
        if !self.readonly {
            return Ok(());
        }
        Err(
            Error::new(ErrorKind::Region, operation, "the memory of this cache is read-only")
                .with_hint("register writable tensors to receive into them"),
        )
    }

    fn num_tokens(&self, stated: Option<u64>, blocks: &BlockTable) -> u64 {
        stated.unwrap_or_else(|| blocks.len() as u64 * u64::from(self.inner.layout().block_tokens()))
    }

    fn lease(&self, py: Python<'_>, lease_s: Option<f64>) -> PyResult<Duration> {
        Ok(enter::timeout(py, "lease_s", lease_s)?.unwrap_or(self.handle.lease))
    }
}

#[pymethods]
impl PyKvCache {
    /// Id at its engine.
    #[getter]
    fn id(&self) -> u64 {
        self.inner.id().0
    }

    /// Where the bytes are.
    #[getter]
    fn layout(&self) -> PyKvLayout {
        PyKvLayout(self.inner.layout().clone())
    }

    /// What the bytes mean (model, layout, shard), in hexadecimal: equal where caches can be mixed.
    #[getter]
    fn fingerprint(&self) -> String {
        hex::encode(&self.inner.fingerprint())
    }

    /// Pins blocks for consumers to pull, under a lease.
    ///
    /// With `stream` it blocks until all that was asked of the stream so far is done, with the interpreter free for others:
    /// from then on consumers may read. Without it the blocks must be written already.
    ///
    /// Args:
    ///     block_ids: Block ids in the order of the tokens; numpy int32, int64 or uint32 is fastest.
    ///     num_tokens: Tokens whose KV the blocks hold; full blocks by default.
    ///     digest: What the tokens are, at most 64 bytes: a consumer may state what it expects. Empty by default.
    ///     consumers: How many may have it; one by default.
    ///     lease_s: How long it stays without being renewed, 3600 at most.
    ///     reference: The reference that this cache's `Issuer` minted for it. Then tokens, digest and consumers are the
    ///         reference's and need not be stated, and consumers who came before are answered now.
    ///     stream: The CUDA stream that writes the blocks: its handle, or an object with `__cuda_stream__` or
    ///         `cuda_stream`, such as `torch.cuda.current_stream()`. A handle is believed: it must be of a stream
    ///         of the blocks' GPU that lives until the call returns.
    ///
    /// Raises:
    ///     LayoutError: A block id is out of range, or the reference is for another number of blocks.
    ///     CapacityError: There are too many exports.
    ///     ReferenceUsedError: The export of this reference was made already.
    ///     ReferenceRestartedError: Another life of the engine issued the reference.
    ///     ReferenceForgedError: The reference was altered, or this engine never issued it.
    ///     ReferenceMismatchError: The reference is for another digest or another kind of cache.
    ///     ConfigError: The reference is for another cache of this engine, or for other tokens or consumers; the lease is
    ///         longer than one may be; or `stream` is no stream, or captures a graph.
    ///     DeviceError: The CUDA driver fails, or something that was asked of the stream has.
    #[pyo3(signature = (
        block_ids, *, num_tokens=None, digest=None, consumers=None, lease_s=None, reference=None, stream=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn export(
        &self,
        block_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::num_tokens)] num_tokens: Option<u64>,
        digest: Option<&[u8]>,
        #[pyo3(from_py_with = number::stated_consumers)] consumers: Option<u32>,
        #[pyo3(from_py_with = number::optional_seconds)] lease_s: Option<f64>,
        reference: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = stream::given)] stream: Option<Given>,
    ) -> PyResult<PyExport> {
        let py = block_ids.py();
        let (blocks, lease) = (blocks::table(block_ids)?, self.lease(py, lease_s)?);
        stream::passed(py, stream, self.device)?;
        let export = if let Some(reference) = reference {
            let reference = reference::read(reference)?;
            let stated = Stated {
                num_tokens,
                digest,
                consumers,
            };
            enter::detached(py, || self.inner.export_issued(blocks, &reference, stated, lease))
        } else {
            let tokens = self.num_tokens(num_tokens, &blocks);
            let (digest, consumers) = (digest.unwrap_or_default(), consumers.unwrap_or(1));
            enter::detached(py, || self.inner.export(blocks, tokens, digest, consumers, lease))
        };
        export.map(PyExport::new)
    }

    /// Returns what mints references of this cache in another process of this instance, a secret. From now on a claim
    /// that comes before its export waits for it, 10 s at most.
    ///
    /// Raises:
    ///     RegionError: The cache was deregistered.
    ///     ClosedError: The engine is closed.
    fn issuer(&self, py: Python<'_>) -> PyResult<PyIssuer> {
        enter::detached(py, || self.inner.issuer()).map(PyIssuer)
    }

    /// Pins blocks for a producer to push into, under a lease.
    ///
    /// With `stream` it blocks as `export` does: the producer may write once nothing of the stream reads the blocks.
    ///
    /// Args:
    ///     block_ids: Block ids in the order of the tokens, none twice.
    ///     num_tokens: Tokens whose KV the blocks will hold; full blocks by default.
    ///     digest: What the tokens are, at most 64 bytes.
    ///     lease_s: How long it stays without being renewed, 3600 at most.
    ///     stream: The CUDA stream that still uses the blocks, as for `export`.
    ///
    /// Raises:
    ///     LayoutError: A block id is out of range or twice.
    ///     RegionError: The memory is read-only.
    ///     ConfigError: The lease is longer than one may be; or `stream` is no stream, or captures a graph.
    ///     DeviceError: The CUDA driver fails, or something that was asked of the stream has.
    #[pyo3(
        signature = (block_ids, *, num_tokens=None, digest=b"".as_slice(), lease_s=None, stream=None),
        text_signature = "($self, block_ids, *, num_tokens=None, digest=b'', lease_s=None, stream=None)"
    )]
    fn offer(
        &self,
        block_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::num_tokens)] num_tokens: Option<u64>,
        digest: &[u8],
        #[pyo3(from_py_with = number::optional_seconds)] lease_s: Option<f64>,
        #[pyo3(from_py_with = stream::given)] stream: Option<Given>,
    ) -> PyResult<PyExport> {
        let py = block_ids.py();
        enter::attached(py, || self.writable("offer"))?;
        let (blocks, lease) = (blocks::table(block_ids)?, self.lease(py, lease_s)?);
        stream::passed(py, stream, self.device)?;
        let tokens = self.num_tokens(num_tokens, &blocks);
        enter::detached(py, || self.inner.offer(blocks, tokens, digest, lease)).map(PyExport::new)
    }

    /// Pulls exported blocks into blocks of this cache.
    ///
    /// Args:
    ///     reference: The reference, or its JSON.
    ///     into: Destination block ids, none twice; as many blocks are pulled.
    ///     first_block: Position of the first block to pull within the export.
    ///     layers: `(first, count)` of the layers to pull; all by default.
    ///     digest: What the tokens must be; the owner refuses when the export's digest differs.
    ///     timeout_s: The transfer's deadline. The owner ends it after its `max_claim_s`, 120 by default, if that is sooner.
    ///     require: The only transport to use, or `"rdma"`: whichever, as long as the bytes go by RDMA.
    ///     require_direct: Refuse a transport that stages bytes on the way.
    ///     peer: The connection to use; by default the one to the engine that the reference names.
    ///     stream: The CUDA stream that still uses the destination blocks, as for `export`: they are written after all
    ///         that it was asked so far. Blocks nobody. What is asked of it later is not ordered: wait for the transfer.
    ///
    /// Raises:
    ///     LayoutError: A block id is out of range or twice, or the layouts can't be converted.
    ///     UnsupportedError: What is required can't be had; says why of every transport.
    ///     PeerUnreachableError: There is no connection to the owner.
    ///     TransferTimeoutError: The owner doesn't say whether it has registered such a cache this moment.
    ///     ConfigError: `stream` is no stream, or captures a graph.
    #[pyo3(signature = (
        reference, into, *, first_block=0, layers=None, digest=None, timeout_s=30.0, require=None, require_direct=false,
        peer=None, stream=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn pull(
        &self,
        reference: &Bound<'_, PyAny>,
        into: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::first_block)] first_block: u32,
        #[pyo3(from_py_with = number::layers)] layers: Option<(u32, u32)>,
        digest: Option<Vec<u8>>,
        #[pyo3(from_py_with = number::seconds)] timeout_s: f64,
        require: Option<&str>,
        require_direct: bool,
        peer: Option<&Bound<'_, PyPeer>>,
        #[pyo3(from_py_with = stream::given)] stream: Option<Given>,
    ) -> PyResult<PyTransfer> {
        let py = into.py();
        enter::attached(py, || self.writable("pull"))?;
        let options = PullOptions {
            first_block,
            layers,
            digest,
            timeout: enter::duration(py, "timeout_s", timeout_s)?,
            require: require.map(|name| enter::attached(py, || name.parse())).transpose()?,
            require_direct,
            peer: peer.map(|peer| peer.get().connection()),
            after: stream::after(py, stream, self.device)?,
        };
        let (reference, blocks) = (reference::read(reference)?, blocks::table(into)?);
        let transfer = enter::detached(py, || self.inner.pull(&reference, blocks, &options))?;
        Ok(PyTransfer::new(transfer, &self.handle))
    }

    /// Pushes blocks of this cache into blocks that a consumer offered.
    ///
    /// Args:
    ///     reference: The reference of the offer, or its JSON.
    ///     block_ids: Source block ids; as many blocks are pushed.
    ///     first_block: Position of the first block to fill within the offer.
    ///     layers: `(first, count)` of the layers to push; all by default.
    ///     digest: What the tokens are; the owner refuses when the offer's digest differs.
    ///     timeout_s: The transfer's deadline. The owner ends it after its `max_claim_s`, 120 by default, if that is sooner.
    ///     require: The only transport to use, or `"rdma"`: whichever, as long as the bytes go by RDMA.
    ///     require_direct: Refuse a transport that stages bytes on the way.
    ///     peer: The connection to use; by default the one to the engine that the reference names.
    ///     stream: The CUDA stream that writes the source blocks, as for `export`: they are read after all that it was asked
    ///         so far. Blocks nobody.
    ///
    /// Raises:
    ///     LayoutError: A block id is out of range, or the layouts can't be converted.
    ///     UnsupportedError: What is required can't be had; says why of every transport.
    ///     PeerUnreachableError: There is no connection to the owner.
    ///     TransferTimeoutError: The owner doesn't say whether it has registered such a cache this moment.
    ///     ConfigError: `stream` is no stream, or captures a graph.
    #[pyo3(signature = (
        reference, block_ids, *, first_block=0, layers=None, digest=None, timeout_s=30.0, require=None,
        require_direct=false, peer=None, stream=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn push(
        &self,
        reference: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::first_block)] first_block: u32,
        #[pyo3(from_py_with = number::layers)] layers: Option<(u32, u32)>,
        digest: Option<Vec<u8>>,
        #[pyo3(from_py_with = number::seconds)] timeout_s: f64,
        require: Option<&str>,
        require_direct: bool,
        peer: Option<&Bound<'_, PyPeer>>,
        #[pyo3(from_py_with = stream::given)] stream: Option<Given>,
    ) -> PyResult<PyTransfer> {
        let py = block_ids.py();
        let options = PullOptions {
            first_block,
            layers,
            digest,
            timeout: enter::duration(py, "timeout_s", timeout_s)?,
            require: require.map(|name| enter::attached(py, || name.parse())).transpose()?,
            require_direct,
            peer: peer.map(|peer| peer.get().connection()),
            after: stream::after(py, stream, self.device)?,
        };
        let (reference, blocks) = (reference::read(reference)?, blocks::table(block_ids)?);
        let transfer = enter::detached(py, || self.inner.push(&reference, blocks, &options))?;
        Ok(PyTransfer::new(transfer, &self.handle))
    }

    /// Takes the cache off the books: its exports and offers are released and nothing new begins on it.
    /// Transfers that are running keep the memory; wait until they, and offers, are quiesced before it is
    /// used for something else.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || self.inner.deregister())
    }

    fn __repr__(&self) -> String {
        let layout = self.inner.layout();
        format!(
            "<pdkv.KvCache {} of {} blocks, {} layers>",
            self.inner.id(),
            layout.num_blocks(),
            layout.num_layers()
        )
    }
}
