//! Streams and events: in which order a device does what it is asked.

use std::sync::Arc;

use pdkv_core::Result;

use super::abi::{CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_READY, CuEvent, CuStream};
use super::context::Context;

/// A stream. One of our own waits for nobody, the default stream included.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    context: Context,
    stream: CuStream,
    own: bool,
}

// SAFETY: the driver takes its own locks; streams may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

impl Stream {
    /// Makes a stream.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn new(context: &Context) -> Result<Self> {
        let entered = context.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: a pointer of ours to write to; the context is entered.
        let status = unsafe { (context.functions().cuStreamCreate)(&raw mut stream, CU_STREAM_NON_BLOCKING) };
        context.driver().check("cuStreamCreate", status)?;
        drop(entered);
        Ok(Self(Arc::new(Handle {
            context: context.clone(),
            stream,
            own: true,
        })))
    }

    /// A stream that somebody else made, by its handle: torch's `stream.cuda_stream`. 0 is the default stream.
    ///
    /// # Safety
    /// The handle must be of a stream in this context that outlives the result.
    pub unsafe fn foreign(context: &Context, handle: u64) -> Self {
        Self(Arc::new(Handle {
            context: context.clone(),
            stream: std::ptr::with_exposed_provenance_mut(handle as usize),
            own: false,
        }))
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    pub(super) fn handle(&self) -> CuStream {
        self.0.stream
    }

    /// Makes what is asked from now on wait for an event. Blocks nobody.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: live handles, both held by values that are borrowed here.
        let status = unsafe { (context.functions().cuStreamWaitEvent)(self.handle(), event.event, 0) };
        context.driver().check("cuStreamWaitEvent", status)
    }

    /// Whether all that was asked is done.
    ///
    /// # Errors
    /// `Device` when the driver fails, or something that was asked earlier has.
    pub fn done(&self) -> Result<bool> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: a live handle.
        let status = unsafe { (context.functions().cuStreamQuery)(self.handle()) };
        ready(context, "cuStreamQuery", status)
    }

    /// Blocks until all that was asked is done.
    ///
    /// # Errors
    /// `Device` when the driver fails, or something that was asked earlier has.
    pub fn synchronize(&self) -> Result<()> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: a live handle.
        let status = unsafe { (context.functions().cuStreamSynchronize)(self.handle()) };
        context.driver().check("cuStreamSynchronize", status)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let entered = self.context.enter_to_drop();
        if self.own && entered.is_some() {
            // SAFETY: made by us and destroyed once; what was asked still happens, the call does not wait.
            unsafe { (self.context.functions().cuStreamDestroy_v2)(self.stream) };
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    context: Context,
    event: CuEvent,
}

// SAFETY: the driver takes its own locks; events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as for `Send`.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event, which counts as passed until it is recorded.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn new(context: &Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: a pointer of ours to write to; the context is entered.
        let status = unsafe { (context.functions().cuEventCreate)(&raw mut event, CU_EVENT_DISABLE_TIMING) };
        context.driver().check("cuEventCreate", status)?;
        Ok(Self {
            context: context.clone(),
            event,
        })
    }

    /// Puts the event behind all that the stream was asked so far.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: live handles, both held by values that are borrowed here.
        let status = unsafe { (self.context.functions().cuEventRecord)(self.event, stream.handle()) };
        self.context.driver().check("cuEventRecord", status)
    }

    /// Whether the stream has passed it.
    ///
    /// # Errors
    /// `Device` when the driver fails, or something before the event has.
    pub fn passed(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: a live handle.
        let status = unsafe { (self.context.functions().cuEventQuery)(self.event) };
        ready(&self.context, "cuEventQuery", status)
    }

    /// Blocks until the stream has passed it.
    ///
    /// # Errors
    /// `Device` when the driver fails, or something before the event has.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: a live handle.
        let status = unsafe { (self.context.functions().cuEventSynchronize)(self.event) };
        self.context.driver().check("cuEventSynchronize", status)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_drop() {
            // SAFETY: made by us and destroyed once; a stream that waits for it still does.
            unsafe { (self.context.functions().cuEventDestroy_v2)(self.event) };
        }
    }
}

fn ready(context: &Context, call: &'static str, status: std::ffi::c_int) -> Result<bool> {
    match status {
        CUDA_ERROR_NOT_READY => Ok(false),
        status => context.driver().check(call, status).map(|()| true),
    }
}
