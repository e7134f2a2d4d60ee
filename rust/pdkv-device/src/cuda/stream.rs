//! Streams and events: in which order a device does what it is asked.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use pdkv_core::Result;

use super::abi::{CuEvent, CuStream};
use super::context::Context;
use super::numbers::{
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_STATUS_NONE,
    CU_STREAM_NON_BLOCKING, CU_STREAM_WRITE_VALUE_DEFAULT, CUDA_ERROR_NOT_READY, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
};

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
    /// Makes a stream. What it is asked comes after what others ask: the device belongs to whoever computes there.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn new(context: &Context) -> Result<Self> {
        let entered = context.enter()?;
        let (mut lowest, mut highest) = (0, 0);
        let range = context.functions().cuCtxGetStreamPriorityRange;
        // SAFETY: two numbers of ours to write to; the context is entered.
        let status = unsafe { range(&raw mut lowest, &raw mut highest) };
        context.driver().check("cuCtxGetStreamPriorityRange", status)?;
        let mut stream = std::ptr::null_mut();
        let create = context.functions().cuStreamCreateWithPriority;
        // SAFETY: a pointer of ours to write to; the context is entered.
        let status = unsafe { create(&raw mut stream, CU_STREAM_NON_BLOCKING, lowest) };
        context.driver().check("cuStreamCreateWithPriority", status)?;
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

    /// Its handle as a number, as torch's `stream.cuda_stream`.
    pub fn address(&self) -> u64 {
        self.0.stream.expose_provenance() as u64
    }

    pub(super) fn handle(&self) -> CuStream {
        self.0.stream
    }

    /// Whether somebody captures what the stream is asked as a CUDA graph: then it does not happen now, and an event in it is one of the graph.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn capturing(&self) -> Result<bool> {
        let context = self.context();
        let _entered = context.enter()?;
        let mut found = CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a live handle, and an integer of ours to write to.
        let status = unsafe { (context.functions().cuStreamIsCapturing)(self.handle(), &raw mut found) };
        if status == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            // The default stream, while one that waits for it is captured.
            return Ok(true);
        }
        context.driver().check("cuStreamIsCapturing", status)?;
        Ok(found != CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Makes what is asked from now on wait for an event. Blocks nobody.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: live handles, both held by values that are borrowed here.
        let status = unsafe { (context.functions().cuStreamWaitEvent)(self.handle(), event.handle(), 0) };
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

    /// Writes a word when all that was asked so far is done, which then can be seen by whoever sees the word.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    ///
    /// # Safety
    /// The word must be live, aligned, reached by the device, and written by nobody else, until the stream has passed the write.
    pub unsafe fn write_value(&self, address: u64, value: u64) -> Result<()> {
        let context = self.context();
        let _entered = context.enter()?;
        let write = context.functions().cuStreamWriteValue64_v2;
        // SAFETY: a live stream, and a word as the caller promises.
        let status = unsafe { write(self.handle(), address, value, CU_STREAM_WRITE_VALUE_DEFAULT) };
        context.driver().check("cuStreamWriteValue64_v2", status)
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
        Self::with_flags(context, CU_EVENT_DISABLE_TIMING)
    }

    /// Makes an event for which a thread that waits sleeps, where it otherwise keeps a core busy. Looking at it is slower.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn to_wait_for(context: &Context) -> Result<Self> {
        Self::with_flags(context, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)
    }

    /// Makes an event that also knows when it was passed, which costs the device a little.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn timed(context: &Context) -> Result<Self> {
        Self::with_flags(context, CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Context, flags: c_uint) -> Result<Self> {
        let _entered = context.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: a pointer of ours to write to; the context is entered.
        let status = unsafe { (context.functions().cuEventCreate)(&raw mut event, flags) };
        context.driver().check("cuEventCreate", status)?;
        Ok(Self {
            context: context.clone(),
            event,
        })
    }

    pub(super) fn handle(&self) -> CuEvent {
        self.event
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

    /// Microseconds from an earlier event to this one. Both must be timed, recorded and passed.
    ///
    /// # Errors
    /// `Device` when one of them is not.
    pub fn elapsed_us(&self, earlier: &Self) -> Result<f64> {
        let _entered = self.context.enter()?;
        let mut milliseconds = 0.0;
        let ask = self.context.functions().cuEventElapsedTime;
        // SAFETY: a number of ours to write to, and live handles.
        let status = unsafe { ask(&raw mut milliseconds, earlier.event, self.event) };
        self.context.driver().check("cuEventElapsedTime", status)?;
        Ok(f64::from(milliseconds) * 1e3)
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

fn ready(context: &Context, call: &'static str, status: c_int) -> Result<bool> {
    match status {
        CUDA_ERROR_NOT_READY => Ok(false),
        status => context.driver().check(call, status).map(|()| true),
    }
}
