//! Memory that pdkv allocates: the host's, shared with peers and lent to numpy and torch as a buffer; or a GPU's, lent by the
//! CUDA array interface. Both are lent by DLPack too.

use std::ffi::c_int;

use pdkv_core::{Error, ErrorKind};
use pdkv_device::Memory;
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::buffers::{self, Held};
use crate::errors;
use crate::memory;

/// Memory allocated by pdkv, of this host or of a GPU, which peers on this host read and write directly.
///
/// Host memory is lent by the buffer protocol: `numpy.frombuffer(pool, dtype)`, `torch.frombuffer(...)`. Memory of a GPU is
/// lent by the CUDA array interface: `torch.as_tensor(pool)`, `cupy.asarray(pool)`. Both are lent by DLPack:
/// `torch.from_dlpack(pool)`. What is lent is one axis of `nbytes` bytes of type `uint8`; nothing is copied, and tensors
/// inside the pool keep it alive. Registering one takes the path that shares memory.
#[pyclass(name = "Pool", module = "pdkv", frozen, weakref)]
pub(crate) struct PyPool(Held);

impl PyPool {
    pub(crate) fn new(memory: Memory) -> Self {
        Self(Held::new(memory))
    }

    pub(crate) fn memory(&self) -> &Memory {
        self.0.get()
    }
}

#[pymethods]
impl PyPool {
    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory().len()
    }

    /// The address of the first byte in this process.
    #[getter]
    fn address(&self) -> u64 {
        self.memory().address()
    }

    /// The number of the GPU that holds it; `None` for host memory.
    #[getter]
    fn device(&self) -> Option<u32> {
        memory::device_of(self.memory())
    }

    fn __len__(&self) -> usize {
        self.memory().len() as usize
    }

    fn __repr__(&self) -> String {
        let place = self
            .device()
            .map_or_else(String::new, |device| format!(" on {}", memory::name(device)));
        format!(
            "<pdkv.Pool of {} bytes at {:#x}{place}>",
            self.memory().len(),
            self.memory().address()
        )
    }

    /// The pool as one axis of bytes, version 3 of the interface; only of a GPU's memory. No stream is named: nothing that
    /// pdkv was asked is under way on memory of a transfer that has ended.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.device().is_none() {
            return Err(PyAttributeError::new_err(
                "__cuda_array_interface__: the pool is host memory",
            ));
        }
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.memory().len(),))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.memory().address(), false))?;
        interface.set_item("strides", py.None())?;
        interface.set_item("stream", py.None())?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    /// The device by DLPack's numbers: (type, number), as in `(2, 0)` for the first GPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        buffers::dlpack_device(self.memory())
    }

    /// Returns a capsule of all bytes, as DLPack says.
    ///
    /// Args:
    ///     stream: Where the caller will use the memory. Nothing is under way on it, so no stream has to wait. For host
    ///         memory it must be `None`; 0 names no stream.
    ///     max_version: The newest DLPack that the caller reads, as `(major, minor)`; before 1.0 by default.
    ///     dl_device: Must be where the memory is.
    ///     copy: Must not be true.
    ///
    /// Raises:
    ///     BufferError: A copy, or memory of another device, is asked for.
    ///     ConfigError: `stream` is none.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<&Bound<'py, PyTuple>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let here = buffers::dlpack_device(self.memory());
        if let Some(wish) = dl_device.filter(|wish| wish.extract().ok() != Some(here)) {
            return Err(PyBufferError::new_err(format!(
                "the pool is on device {here:?}, not {wish}"
            )));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a pool is lent, never copied"));
        }
        if let Some(stream) = stream {
            let number: i64 = stream.extract().unwrap_or(0);
            if self.device().is_none() || number == 0 || number < -1 {
                let what = format!("`stream` is `{stream}`");
                let error = Error::new(ErrorKind::Config, "dlpack", what).with_hint(
                    "for memory of a GPU 1 and 2 are the default streams, -1 asks for no waiting; for host memory give None",
                );
                return Err(errors::to_python(py, &error));
            }
        }
        buffers::lend_dlpack(
            py,
            self.memory().clone(),
            max_version.is_some_and(|version| version >= (1, 0)),
        )
    }

    /// Lends the whole pool, where it is host memory.
    ///
    /// # Safety
    /// Called by Python only, with the view to fill.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get().memory();
        if let Memory::Device(_) = memory {
            return Err(PyBufferError::new_err(
                "the pool is on a GPU: torch.as_tensor, cupy.asarray and from_dlpack take it",
            ));
        }
        // SAFETY: Python passes the view to fill, and the pool keeps its memory.
        unsafe { buffers::lend(slf.as_any(), memory.address(), memory.len(), view, flags) }
    }
}
