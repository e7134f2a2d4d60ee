//! A connection to another engine: raw reads and writes, notifications, the links there are.

use std::sync::Arc;
use std::time::Duration;

use pdkv_core::id::Incarnation;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_engine::{LocalSpan, Peer, RawOptions, RemoteSpan};
use pyo3::prelude::*;

use crate::engine::Handle;
use crate::enter;
use crate::link::PyLink;
use crate::number;
use crate::pipe::PyPipeSender;
use crate::reference;
use crate::span::{self, Stretch};
use crate::stream::{self, Given};
use crate::transfer::PyTransfer;

/// A connection to another engine.
#[pyclass(name = "Peer", module = "pdkv", frozen, weakref)]
pub(crate) struct PyPeer {
    inner: Peer,
    handle: Arc<Handle>,
}

/// The two ends of a raw transfer, as the engine takes them.
struct Ends {
    local: Vec<LocalSpan>,
    remote: Vec<RemoteSpan>,
}

impl PyPeer {
    pub(crate) fn new(inner: Peer, handle: &Arc<Handle>) -> Self {
        Self {
            inner,
            handle: Arc::clone(handle),
        }
    }

    pub(crate) fn connection(&self) -> Peer {
        self.inner.clone()
    }

    fn ends(&self, py: Python<'_>, local: &[Stretch], remote: &[Stretch], written: &[Stretch]) -> PyResult<Ends> {
        enter::attached(py, || {
            check_owner(local, self.handle.engine.incarnation(), "this engine")?;
            check_owner(remote, self.inner.incarnation(), self.inner.name())?;
            if let Some(stretch) = written.iter().find(|stretch| stretch.readonly) {
                return Err(
                    Error::new(ErrorKind::Region, "raw transfer", "the destination is read-only memory")
                        .with("region", stretch.region),
                );
            }
            Ok(Ends {
                local: local
                    .iter()
                    .map(|s| LocalSpan {
                        region: s.region,
                        offset: s.offset,
                        len: s.len,
                    })
                    .collect(),
                remote: remote
                    .iter()
                    .map(|s| RemoteSpan {
                        region: s.region,
                        offset: s.offset,
                        len: s.len,
                    })
                    .collect(),
            })
        })
    }
}

fn check_owner(stretches: &[Stretch], owner: Incarnation, name: &str) -> Result<()> {
    let Some(other) = stretches.iter().find(|stretch| stretch.incarnation != owner) else {
        return Ok(());
    };
    Err(Error::new(
        ErrorKind::Region,
        "raw transfer",
        format!("region `{}` is not one of {name}", other.region),
    )
    .with("incarnation", other.incarnation)
    .with("expected", owner)
    .with_hint(
        "locally give this engine's regions, remotely the descriptors that the peer sent; an engine that \
             restarted must send new ones",
    ))
}

fn options(
    py: Python<'_>,
    timeout_s: f64,
    require: Option<&str>,
    stream: Option<Given>,
    local: &[Stretch],
) -> PyResult<RawOptions> {
    let device = local.iter().find_map(|stretch| stretch.device);
    Ok(RawOptions {
        timeout: enter::duration(py, "timeout_s", timeout_s)?,
        require: require.map(|name| enter::attached(py, || name.parse())).transpose()?,
        after: stream::after(py, stream, device)?,
    })
}

#[pymethods]
impl PyPeer {
    /// How the other engine calls itself.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// `"host:port"` of the connection.
    #[getter]
    fn address(&self) -> String {
        self.inner.address().to_string()
    }

    /// The life of the other engine, in hexadecimal.
    #[getter]
    fn incarnation(&self) -> String {
        self.inner.incarnation().to_string()
    }

    /// Whether the connection stands.
    #[getter]
    fn alive(&self) -> bool {
        self.inner.alive()
    }

    /// Returns the transports, best first: of each whether it can be used, why or why not, and how it moves memory of GPUs.
    fn links(&self) -> Vec<PyLink> {
        self.inner.links().into_iter().map(PyLink::new).collect()
    }

    /// Reads the peer's memory into memory of this engine.
    ///
    /// Args:
    ///     dst: A region of this engine, a span of one, a list of those, or `(region, pairs)` with an N x 2
    ///         int64 array of (offset, nbytes).
    ///     src: The same of the peer, by region descriptors.
    ///     notify: Bytes to deliver to the peer after the data was read.
    ///     timeout_s: The transfer's deadline.
    ///     require: The only transport to use, or `"rdma"`: whichever, as long as the bytes go by RDMA.
    ///     stream: The CUDA stream that still uses the destination: it is written after all that the stream was asked so far.
    ///         Its handle, or an object with `__cuda_stream__` or `cuda_stream`. A handle is believed: it must be of a
    ///         stream of the destination's GPU that lives until the call returns. Blocks nobody.
    ///
    /// Raises:
    ///     RegionError: A span is not registered, not accessible, or read-only.
    ///     LayoutError: The spans of the two sides do not pair up.
    ///     UnsupportedError: What is required can't be had; says why of every transport.
    ///     TransferTimeoutError: The peer doesn't say whether it has registered such a region this moment.
    ///     ConfigError: `stream` is no stream, or captures a graph.
    #[pyo3(signature = (dst, src, *, notify=None, timeout_s=30.0, require=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn read(
        &self,
        py: Python<'_>,
        dst: &Bound<'_, PyAny>,
        src: &Bound<'_, PyAny>,
        notify: Option<&[u8]>,
        #[pyo3(from_py_with = number::seconds)] timeout_s: f64,
        require: Option<&str>,
        #[pyo3(from_py_with = stream::given)] stream: Option<Given>,
    ) -> PyResult<PyTransfer> {
        let (dst, src) = (span::read(dst)?, span::read(src)?);
        let options = options(py, timeout_s, require, stream, &dst)?;
        let ends = self.ends(py, &dst, &src, &dst)?;
        let transfer = enter::detached(py, || self.inner.read(&ends.local, &ends.remote, notify, &options))?;
        Ok(PyTransfer::new(transfer, &self.handle))
    }

    /// Writes memory of this engine into the peer's.
    ///
    /// Args:
    ///     dst: Memory of the peer, as `src` of `read`.
    ///     src: Memory of this engine, as `dst` of `read`.
    ///     notify: Bytes to deliver to the peer after the data arrived.
    ///     timeout_s: The transfer's deadline.
    ///     require: The only transport to use, or `"rdma"`: whichever, as long as the bytes go by RDMA.
    ///     stream: The CUDA stream that writes the source, as for `read`: it is read after all that the stream was asked so far.
    ///
    /// Raises:
    ///     RegionError: A span is not registered, not accessible, or read-only.
    ///     LayoutError: The spans of the two sides do not pair up.
    ///     UnsupportedError: What is required can't be had; says why of every transport.
    ///     TransferTimeoutError: The peer doesn't say whether it has registered such a region this moment.
    ///     ConfigError: `stream` is no stream, or captures a graph.
    #[pyo3(signature = (dst, src, *, notify=None, timeout_s=30.0, require=None, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn write(
        &self,
        py: Python<'_>,
        dst: &Bound<'_, PyAny>,
        src: &Bound<'_, PyAny>,
        notify: Option<&[u8]>,
        #[pyo3(from_py_with = number::seconds)] timeout_s: f64,
        require: Option<&str>,
        #[pyo3(from_py_with = stream::given)] stream: Option<Given>,
    ) -> PyResult<PyTransfer> {
        let (dst, src) = (span::read(dst)?, span::read(src)?);
        let options = options(py, timeout_s, require, stream, &src)?;
        let ends = self.ends(py, &src, &dst, &dst)?;
        let transfer = enter::detached(py, || self.inner.write(&ends.remote, &ends.local, notify, &options))?;
        Ok(PyTransfer::new(transfer, &self.handle))
    }

    /// Sends bytes that the peer finds in `Engine.notifications`.
    ///
    /// Raises:
    ///     CapacityError: They are too many, or too many wait to be sent.
    ///     PeerLostError: The connection is gone.
    fn notify(&self, py: Python<'_>, message: &[u8]) -> PyResult<()> {
        enter::detached(py, || self.inner.notify(message))
    }

    /// Opens a pipe to the peer, where `Engine.accept_pipe` accepts it under the same name.
    ///
    /// Returns before it is accepted; what is sent meanwhile waits. A peer keeps 64 pipes that nobody has accepted.
    ///
    /// Args:
    ///     channel: The name, at most 128 bytes.
    ///     limit_bytes: Once more bytes of tensors are queued, `send` waits.
    ///
    /// Raises:
    ///     UnsupportedError: The peer's release has no pipes.
    ///     PeerUnreachableError: The peer takes no more streams.
    ///     PeerLostError: The connection is gone.
    #[pyo3(signature = (channel, *, limit_bytes=1_000_000_000))]
    fn open_pipe(
        &self,
        py: Python<'_>,
        channel: Vec<u8>,
        #[pyo3(from_py_with = number::limit_bytes)] limit_bytes: u64,
    ) -> PyResult<PyPipeSender> {
        let peer = self.inner.clone();
        let opened = enter::interruptible(py, move || peer.open_pipe(&channel, limit_bytes))?;
        Ok(PyPipeSender::new(opened, &self.handle))
    }

    /// Tells the owner of an export that this consumer does not want it.
    fn reject(&self, py: Python<'_>, reference: &Bound<'_, PyAny>) -> PyResult<()> {
        let reference = reference::read(reference)?;
        enter::detached(py, || self.inner.reject(&reference))
    }

    /// Asks the owner of an export to make its lease end `lease_s` from now, unless it lasts longer already.
    ///
    /// Returns:
    ///     The seconds that remain, as the owner answered: 3600 at most, however many were asked for.
    ///
    /// Raises:
    ///     StaleReferenceError: The export ended.
    ///     TransferTimeoutError: The owner did not answer within `timeout_s`.
    #[pyo3(signature = (reference, lease_s, *, timeout_s=5.0))]
    fn renew(
        &self,
        py: Python<'_>,
        reference: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::seconds)] lease_s: f64,
        #[pyo3(from_py_with = number::seconds)] timeout_s: f64,
    ) -> PyResult<f64> {
        let (reference, lease) = (reference::read(reference)?, enter::duration(py, "lease_s", lease_s)?);
        let timeout = enter::duration(py, "timeout_s", timeout_s)?;
        let peer = self.inner.clone();
        enter::interruptible(py, move || peer.renew(&reference, lease, timeout)).map(|left| left.as_secs_f64())
    }

    /// Waits until the peer has said whether it has the cache that a reference names. A `pull` or `push` of it would wait
    /// for that in its caller, where the owner has registered the cache this moment or the reference is made up.
    ///
    /// Returns:
    ///     Whether `pull` and `push` will wait for nobody now. With `timeout_s` 0 nobody is asked either.
    ///
    /// Raises:
    ///     ReferenceUnknownError: The peer says that it has no such cache.
    ///     TransferTimeoutError: It says nothing.
    ///     PeerLostError: The connection is gone.
    #[pyo3(signature = (reference, *, timeout_s=0.0))]
    fn await_cache(
        &self,
        py: Python<'_>,
        reference: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::seconds)] timeout_s: f64,
    ) -> PyResult<bool> {
        let reference = reference::read(reference)?;
        let timeout = enter::duration(py, "timeout_s", timeout_s)?;
        let known = enter::detached(py, || self.inner.await_cache(&reference, Duration::ZERO))?;
        if known || timeout.is_zero() {
            return Ok(known);
        }
        let peer = self.inner.clone();
        enter::interruptible(py, move || peer.await_cache(&reference, timeout))
    }

    /// Ends the connection; transfers over it fail. Closing twice is fine.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || {
            self.inner.close();
            Ok(())
        })
    }

    fn __repr__(&self) -> String {
        format!("<pdkv.Peer {} ({})>", self.inner.name(), self.inner.address())
    }
}
