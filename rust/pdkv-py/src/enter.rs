//! The one door from Python into native code. It catches panics, maps errors to the classes of
//! `pdkv.errors`, lets go of the interpreter around anything that may wait, and waits in slices so
//! that Ctrl-C is heard. Nothing else in this crate calls the engine.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::errors;

/// The longest a wait goes without looking for signals.
const SLICE: Duration = Duration::from_millis(50);

/// Runs `call`, which returns at once, without letting go of the interpreter. It takes no lock that another thread may
/// hold for long: not the one of the engine's state.
pub(crate) fn attached<T>(py: Python<'_>, call: impl FnOnce() -> Result<T>) -> PyResult<T> {
    guarded(call).map_err(|error| errors::to_python(py, &error))
}

/// Runs `call`, which may take a while, with the interpreter free for other threads.
pub(crate) fn detached<T: Send>(py: Python<'_>, call: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    py.detach(|| guarded(call))
        .map_err(|error| errors::to_python(py, &error))
}

/// Waits until `step` says true or `timeout` has passed; says which. `step` is called with the time
/// it may wait, and first with none, so that what is already there costs no switch.
pub(crate) fn waiting(
    py: Python<'_>,
    timeout: Option<Duration>,
    step: impl Fn(Duration) -> Result<bool> + Sync,
) -> PyResult<bool> {
    if attached(py, || step(Duration::ZERO))? {
        return Ok(true);
    }
    let started = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        if left == Some(Duration::ZERO) {
            return Ok(false);
        }
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        if detached(py, || step(slice))? {
            return Ok(true);
        }
        py.check_signals()?;
    }
}

/// Waits for what `step` finds, no longer than `timeout`. `ready` looks first whether it is there already, at no cost;
/// `step` is called with the time it may wait, once at least.
pub(crate) fn awaited<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    ready: impl FnOnce() -> Result<Option<T>>,
    step: impl Fn(Duration) -> Result<Option<T>> + Sync,
) -> PyResult<Option<T>> {
    if let Some(found) = attached(py, ready)? {
        return Ok(Some(found));
    }
    let started = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        if let Some(found) = detached(py, || step(slice))? {
            return Ok(Some(found));
        }
        if left == Some(slice) {
            return Ok(None);
        }
        py.check_signals()?;
    }
}

/// Runs `call`, which can't be asked to wait in slices, on a thread of its own, and listens for signals
/// meanwhile. After a signal it goes on unattended, to its own timeout.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (give, mut take) = mpsc::channel();
    let named = thread::Builder::new().name("pdkv-call".to_owned());
    let started = named.spawn(move || {
        // Nobody takes it after a signal.
        let _ = give.send(guarded(call));
    });
    attached(py, || {
        started.map_err(|error| Error::new(ErrorKind::Capacity, "native call", "no thread for it").with_source(error))
    })?;
    loop {
        let (taken, again) = py.detach(move || (take.recv_timeout(SLICE), take));
        take = again;
        match taken {
            Ok(result) => return result.map_err(|error| errors::to_python(py, &error)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let error = Error::new(ErrorKind::Internal, "native call", "its thread vanished");
                return Err(errors::to_python(py, &error));
            }
        }
    }
}

/// Reads a timeout in seconds. `None` waits for ever.
pub(crate) fn timeout(py: Python<'_>, name: &'static str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds.map(|seconds| duration(py, name, seconds)).transpose()
}

/// Reads a number of seconds.
pub(crate) fn duration(py: Python<'_>, name: &'static str, seconds: f64) -> PyResult<Duration> {
    attached(py, || {
        Duration::try_from_secs_f64(seconds).map_err(|_| {
            Error::new(ErrorKind::Config, name, format!("`{name}` is `{seconds}`"))
                .with_hint("give a number of seconds, zero or more")
        })
    })
}

fn guarded<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(internal(panic.as_ref())))
}

fn internal(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    Error::new(ErrorKind::Internal, "native call", format!("panicked: {text}"))
}

/// Panics on purpose, so that a test can see what the door makes of it.
#[pyfunction]
#[pyo3(name = "_panic")]
pub(crate) fn panic_on_purpose(py: Python<'_>, message: String) -> PyResult<()> {
    detached(py, || std::panic::panic_any(message))
}
