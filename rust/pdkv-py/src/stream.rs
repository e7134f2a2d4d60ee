//! CUDA streams as Python gives them: a handle, or an object of torch, cupy or `cuda.core`; and what waits for them.
//!
//! A stream is looked at once, in the call that takes it: an event is put behind all it was asked so far.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{Event, Gpu, Stream};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::blocks;
use crate::buffers;
use crate::enter;
use crate::errors;

/// A stream that somebody named.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given {
    handle: u64,
    /// The GPU, where the object says it.
    device: Option<u32>,
}

/// Reads `stream=`: `None`, an integer, or an object with `__cuda_stream__`, `cuda_stream` or `ptr`. That the stream lives nobody can see.
pub(crate) fn given(object: &Bound<'_, PyAny>) -> PyResult<Option<Given>> {
    if object.is_none() {
        return Ok(None);
    }
    let handle = handle_of(object)?;
    Ok(Some(Given {
        handle,
        device: device_of(object),
    }))
}

/// The number of the GPU that a stream says it is of: torch, cupy, `cuda.core`.
fn device_of(object: &Bound<'_, PyAny>) -> Option<u32> {
    let number = |owner: &Bound<'_, PyAny>, name| owner.getattr(name).ok()?.extract().ok();
    number(object, "device_index")
        .or_else(|| number(object, "device_id"))
        .or_else(|| number(&object.getattr("device").ok()?, "device_id"))
}

fn handle_of(object: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = object.py();
    if let Some(handle) = number_of(object) {
        return Ok(handle);
    }
    if let Ok(protocol) = object.getattr(intern!(py, "__cuda_stream__")) {
        // A method, but an attribute in the first releases that had it: (version of the protocol, handle).
        let pair = if protocol.is_callable() {
            protocol.call0()?
        } else {
            protocol
        };
        if let Some(handle) = pair.get_item(1).ok().as_ref().and_then(number_of) {
            return Ok(handle);
        }
    }
    for name in [intern!(py, "cuda_stream"), intern!(py, "ptr")] {
        if let Some(handle) = object.getattr(name).ok().as_ref().and_then(number_of) {
            return Ok(handle);
        }
    }
    let what = format!("a `{}` is no CUDA stream", blocks::type_name(object));
    let error = Error::new(ErrorKind::Config, "stream", what).with_hint(
        "give the handle as an integer, or an object with `__cuda_stream__` or `cuda_stream`, as torch's streams",
    );
    Err(errors::to_python(py, &error))
}

/// A handle. A bool is none, though Python takes it for an integer: `True` would be the default stream.
fn number_of(object: &Bound<'_, PyAny>) -> Option<u64> {
    if object.is_instance_of::<PyBool>() {
        return None;
    }
    object.extract().ok()
}

impl Given {
    /// The GPU that the stream is of. `memory` is the GPU of the memory that it is about.
    fn gpu(self, memory: Option<u32>) -> Result<Gpu> {
        let Some(device) = self.device.or(memory) else {
            let error = Error::new(ErrorKind::Config, "stream", "which GPU the stream is of can't be told");
            return Err(
                error.with_hint("the memory is the host's: give a stream object that knows its device, as torch's do")
            );
        };
        Gpu::open(device)
    }
}

/// What a transfer on memory of that GPU (or of the host, without one) has to wait for.
pub(crate) fn after(py: Python<'_>, stream: Option<Given>, memory: Option<u32>) -> PyResult<Option<Arc<Event>>> {
    let Some(stream) = stream else {
        return Ok(None);
    };
    // In this thread, whose own default stream may be meant.
    let event = enter::detached(py, || buffers::recorded(&stream.gpu(memory)?, stream.handle))?;
    Ok(Some(Arc::new(event)))
}

/// Waits here for all that was asked of a stream.
pub(crate) fn passed(py: Python<'_>, stream: Option<Given>, memory: Option<u32>) -> PyResult<()> {
    let Some(stream) = stream else {
        return Ok(());
    };
    enter::detached(py, || buffers::waited_for(&stream.gpu(memory)?, stream.handle))
}

/// The stream by which owners of tensors on a GPU hand them over: one for each, for the life of the process.
///
/// Its handle is what `__dlpack__(stream=...)` is given; the owner makes it wait for what is under way.
#[pyfunction]
pub(crate) fn arrival_stream(py: Python<'_>, device: u32) -> PyResult<u64> {
    static STREAMS: Mutex<BTreeMap<u32, Stream>> = Mutex::new(BTreeMap::new());
    enter::detached(py, || {
        let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.get(&device) {
            return Ok(stream.address());
        }
        let stream = Stream::new(Gpu::open(device)?.context())?;
        let handle = stream.address();
        streams.insert(device, stream);
        Ok(handle)
    })
}
