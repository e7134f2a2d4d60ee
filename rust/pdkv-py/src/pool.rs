//! Memory that pdkv allocates: shared with peers on the host, lent to numpy and torch as a buffer.

use std::ffi::c_int;
use std::sync::Arc;

use pdkv_device::HostRegion;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::buffers;

/// Host memory allocated by pdkv, which peers on this host read and write directly.
///
/// Lends its bytes by the buffer protocol: `numpy.frombuffer(pool, dtype)`, `torch.frombuffer(...)`.
/// Tensors inside it keep it alive; registering one takes the shared-memory path.
#[pyclass(name = "Pool", module = "pdkv", frozen, weakref)]
pub(crate) struct PyPool(Arc<HostRegion>);

impl PyPool {
    pub(crate) fn new(memory: Arc<HostRegion>) -> Self {
        Self(memory)
    }
}

#[pymethods]
impl PyPool {
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
        format!("<pdkv.Pool of {} bytes at {:#x}>", self.0.len(), self.0.address())
    }

    /// Lends the whole pool.
    ///
    /// # Safety
    /// Called by Python only, with the view to fill.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().0;
        // SAFETY: Python passes the view to fill, and the pool keeps its memory.
        unsafe { buffers::lend(slf.as_any(), memory.address(), memory.len(), view, flags) }
    }
}
