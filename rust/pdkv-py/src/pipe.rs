//! The two ends of a pipe. What a tensor is, `pdkv.pipe` decides; here its facts become items, and items come back as
//! a tag, a dtype's name, a shape and a buffer.

use std::ffi::c_int;
use std::sync::Arc;

use pdkv_core::pipe::{INLINE_MAX, Strided};
use pdkv_core::{Error, ErrorKind, Result, Retry};
use pdkv_engine::{PipeBuffer, PipeItem, PipeReceiver, PipeSender, PipeStats, PipeTensor};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::buffers;
use crate::engine::Handle;
use crate::enter;
use crate::number;
use crate::path::PyPath;

/// The sending end of a pipe: a FIFO of items towards one peer, made by `Peer.open_pipe`.
///
/// Sending queues; a thread of the pipe's own delivers. What that thread fails of is raised by the next call. Use it
/// from any thread. A pipe that is dropped without `close` gives up what is queued.
#[pyclass(name = "PipeSender", module = "pdkv._core", frozen, weakref)]
pub(crate) struct PyPipeSender {
    inner: PipeSender,
    // Keeps the engine.
    _handle: Arc<Handle>,
}

/// The receiving end of a pipe, made by `Engine.accept_pipe`.
///
/// It has no thread: whoever calls `recv` reads. Use it from any thread, one receives at a time.
#[pyclass(name = "PipeReceiver", module = "pdkv._core", frozen, weakref)]
pub(crate) struct PyPipeReceiver {
    inner: PipeReceiver,
    _handle: Arc<Handle>,
}

/// The bytes of one received tensor, row-major and writable: `numpy.frombuffer(buffer, ...)`. Dropping it, and
/// whatever was made of it, gives the memory back to the pipe for the next item.
#[pyclass(name = "PipeBuffer", module = "pdkv._core", frozen, weakref)]
pub(crate) struct PyPipeBuffer(PipeBuffer);

impl PyPipeSender {
    pub(crate) fn new(inner: PipeSender, handle: &Arc<Handle>) -> Self {
        Self {
            inner,
            _handle: Arc::clone(handle),
        }
    }
}

impl PyPipeReceiver {
    pub(crate) fn new(inner: PipeReceiver, handle: &Arc<Handle>) -> Self {
        Self {
            inner,
            _handle: Arc::clone(handle),
        }
    }
}

fn stats<'py>(py: Python<'py>, stats: &PipeStats) -> PyResult<Bound<'py, PyDict>> {
    let counters = PyDict::new(py);
    counters.set_item("items", stats.items)?;
    counters.set_item("bytes", stats.bytes)?;
    counters.set_item("inline_bytes", stats.inline_bytes)?;
    counters.set_item("direct_bytes", stats.direct_bytes)?;
    counters.set_item("staged_bytes", stats.staged_bytes)?;
    Ok(counters)
}

fn late(py: Python<'_>, operation: &'static str, done: bool, what: impl FnOnce() -> String) -> PyResult<()> {
    enter::attached(py, || {
        if done {
            return Ok(());
        }
        Err(Error::new(ErrorKind::TransferTimeout, operation, what()).with_retry(Retry::Later))
    })
}

/// A tensor as Python describes it.
struct Given {
    shape: Vec<u64>,
    at: Strided,
    itemsize: u64,
    address: u64,
}

impl Given {
    fn new(shape: Vec<i64>, strides: &[i64], itemsize: u64, address: u64) -> Result<Self> {
        let extent = |extent: i64| {
            u64::try_from(extent).map_err(|_| {
                Error::new(
                    ErrorKind::Layout,
                    "send",
                    format!("the shape has the extent `{extent}`"),
                )
            })
        };
        let shape = shape.into_iter().map(extent).collect::<Result<Vec<_>>>()?;
        let at = Strided::new(&shape, strides, itemsize)?;
        Ok(Self {
            shape,
            at,
            itemsize,
            address,
        })
    }

    /// The memory that the tensor's bytes lie in, held by `keeper`.
    fn region(&self, keeper: &Bound<'_, PyAny>) -> Result<Arc<pdkv_device::HostRegion>> {
        let lowest = self.address.checked_sub(self.at.below());
        let lowest = lowest.ok_or_else(|| Error::new(ErrorKind::Region, "send", "the tensor begins before memory"))?;
        buffers::foreign(lowest, self.at.reach(), false, keeper.clone().unbind())
    }
}

#[pymethods]
impl PyPipeSender {
    /// Queues an item.
    ///
    /// A tensor of at most 64 KiB is copied before this returns. A larger one stays where it is, held by `keeper`, and
    /// must not change until the receiver has it: `flush` waits for that.
    ///
    /// Args:
    ///     tag: Bytes for the receiver's application, at most 64 KiB.
    ///     dtype: The name of the tensor's dtype; `None` for an item without a tensor.
    ///     shape: Its extents.
    ///     strides: Elements from one to the next in each dimension; may be negative or 0.
    ///     itemsize: Bytes of an element.
    ///     address: Of the first element, valid as long as `keeper` lives.
    ///     keeper: Whatever holds the memory.
    ///     timeout_s: The longest to wait while more than the pipe's limit is queued; `None` waits for ever.
    ///
    /// Raises:
    ///     TransferTimeoutError: There was no room in time; the item is not queued.
    ///     PdkvError: What ended the pipe.
    #[pyo3(signature = (tag, dtype, shape, strides, itemsize, address, keeper, timeout_s=None))]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "keywords in Python, which hands over sequences of any kind"
    )]
    fn send(
        &self,
        py: Python<'_>,
        tag: &[u8],
        dtype: Option<&str>,
        #[pyo3(from_py_with = number::extents)] shape: Vec<i64>,
        #[pyo3(from_py_with = number::extents)] strides: Vec<i64>,
        #[pyo3(from_py_with = number::itemsize)] itemsize: u64,
        #[pyo3(from_py_with = number::address)] address: u64,
        keeper: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<()> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        let pipe = &self.inner;
        let Some(dtype) = dtype else {
            let sent = enter::waiting(py, timeout, |wait| pipe.send_small(tag, None, wait, &|_| Ok(())))?;
            return self.sent(py, sent);
        };
        let given = enter::attached(py, || Given::new(shape, &strides, itemsize, address))?;
        let tensor = PipeTensor {
            dtype,
            shape: &given.shape,
            itemsize: given.itemsize,
        };
        let dense = given.at.is_dense();
        let nbytes = given.at.nbytes();
        let sent = if nbytes == 0 {
            enter::waiting(py, timeout, |wait| {
                pipe.send_small(tag, Some(tensor), wait, &|_| Ok(()))
            })?
        } else if nbytes <= INLINE_MAX as u64 && dense {
            let fill = |into: &mut [u8]| buffers::copy_out(given.address, into);
            enter::waiting(py, timeout, |wait| pipe.send_small(tag, Some(tensor), wait, &fill))?
        } else {
            let memory = enter::attached(py, || given.region(keeper))?;
            if nbytes <= INLINE_MAX as u64 {
                let fill = |into: &mut [u8]| pdkv_device::gather_into(into, &memory, &given.at);
                enter::waiting(py, timeout, |wait| pipe.send_small(tag, Some(tensor), wait, &fill))?
            } else {
                enter::waiting(py, timeout, |wait| {
                    pipe.send_large(tag, tensor, &memory, &given.at, wait)
                })?
            }
        };
        self.sent(py, sent)
    }

    /// Waits until the receiver's application has taken everything that was sent before.
    ///
    /// Raises:
    ///     TransferTimeoutError: It had not in time.
    ///     PdkvError: What ended the pipe before.
    #[pyo3(signature = (timeout_s=None))]
    fn flush(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<()> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        let items = self.inner.accepted();
        let done = enter::waiting(py, timeout, |wait| self.inner.flushed(items, wait))?;
        late(py, "flush", done, || {
            "the receiver has not taken everything yet".to_owned()
        })
    }

    /// Flushes, says goodbye, and ends. Closing twice is fine.
    ///
    /// Raises:
    ///     TransferTimeoutError: The receiver had not taken everything in time; call again, or `abort`.
    ///     PdkvError: What kept items from the receiver, unless that was raised before.
    #[pyo3(signature = (timeout_s=None))]
    fn close(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<()> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        enter::attached(py, || self.inner.close())?;
        let done = enter::waiting(py, timeout, |wait| self.inner.closed(wait))?;
        late(py, "close", done, || {
            "the receiver has not taken everything yet".to_owned()
        })
    }

    /// Gives up: what is queued is dropped, the receiver's `recv` raises `TransferCancelledError`.
    fn abort(&self) {
        self.inner.abort();
    }

    /// Bytes of tensors that wait to be sent.
    #[getter]
    fn queued_bytes(&self) -> u64 {
        self.inner.queued_bytes()
    }

    /// Counters: `items`, `bytes`, and of these `inline_bytes` (inside the stream), `direct_bytes` (from the tensor
    /// into the receiver's memory) and `staged_bytes` (put together first).
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner.stats())
    }

    /// The way the last large item took, or `None`.
    #[getter]
    fn path(&self) -> Option<PyPath> {
        self.inner.path().map(PyPath::new)
    }

    /// Whether it takes items.
    #[getter]
    fn alive(&self) -> bool {
        self.inner.alive()
    }

    fn __repr__(&self) -> String {
        format!("<pdkv.{:?}>", self.inner)
    }
}

impl PyPipeSender {
    fn sent(&self, py: Python<'_>, sent: bool) -> PyResult<()> {
        late(py, "send", sent, || {
            format!(
                "`{}` bytes are queued, and the receiver is slow",
                self.inner.queued_bytes()
            )
        })
    }
}

/// `(tag, dtype, shape, bytes)`.
type Item<'py> = (
    Bound<'py, PyBytes>,
    Option<Bound<'py, PyString>>,
    Bound<'py, PyTuple>,
    Option<PyPipeBuffer>,
);

#[pymethods]
impl PyPipeReceiver {
    /// Receives the next item.
    ///
    /// Args:
    ///     timeout_s: The longest to wait; `None` waits for ever. After a timeout the next call goes on with the same
    ///         item.
    ///
    /// Returns:
    ///     `(tag, dtype, shape, buffer)`; without a tensor `(tag, None, (), None)`.
    ///
    /// Raises:
    ///     TransferTimeoutError: No item was whole in time.
    ///     ClosedError: The sender has closed the pipe and everything was received (`context["closed_by"]` is
    ///         `"peer"`), or this end is closed (`"here"`).
    ///     PeerLostError: The sender is gone.
    ///     TransferCancelledError: The sender gave up. Whatever else it failed of is raised as what it is.
    ///     IntegrityError: It sent what no sender sends.
    ///     CapacityError: There is no memory for the item, which is not lost.
    #[pyo3(signature = (timeout_s=None))]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<Item<'py>> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        let pipe = &self.inner;
        let Some(item) = enter::awaited(py, timeout, || pipe.ready(), |wait| pipe.recv(wait))? else {
            late(py, "recv", false, || {
                format!("no item came from `{}` in time", pipe.peer())
            })?;
            unreachable!("that was an error");
        };
        let PipeItem {
            tag,
            dtype,
            shape,
            bytes,
        } = item;
        Ok((
            PyBytes::new(py, &tag),
            dtype.map(|name| PyString::new(py, &name)),
            PyTuple::new(py, shape)?,
            bytes.map(PyPipeBuffer),
        ))
    }

    /// Ends it: the sender is told, a `recv` that waits raises `ClosedError`. Closing twice is fine.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || {
            self.inner.close();
            Ok(())
        })
    }

    /// The name of the engine that sends.
    #[getter]
    fn peer(&self) -> &str {
        self.inner.peer()
    }

    /// The life of that engine, in hexadecimal.
    #[getter]
    fn incarnation(&self) -> String {
        self.inner.incarnation().to_string()
    }

    /// Whether something may still come.
    #[getter]
    fn alive(&self) -> bool {
        self.inner.alive()
    }

    /// Counters: `items`, `bytes`, and of these `inline_bytes` and `direct_bytes`.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner.stats())
    }

    fn __repr__(&self) -> String {
        format!("<pdkv.{:?}>", self.inner)
    }
}

#[pymethods]
impl PyPipeBuffer {
    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len()
    }

    /// The address of the first byte in this process.
    #[getter]
    fn address(&self) -> u64 {
        self.0.address()
    }

    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    fn __repr__(&self) -> String {
        format!("<pdkv.PipeBuffer of {} bytes at {:#x}>", self.0.len(), self.0.address())
    }

    /// Lends the bytes.
    ///
    /// # Safety
    /// Called by Python only, with the view to fill.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (address, len) = (slf.get().0.address(), slf.get().0.len());
        // SAFETY: Python passes the view to fill, and the buffer keeps its bytes at this address.
        unsafe { buffers::lend(slf.as_any(), address, len, view, flags) }
    }
}
