//! Whether the process has descriptors left for a worker: UCX ends the process when it runs out in the middle.

use std::fs::File;

use pdkv_core::{Error, ErrorKind, Result};

/// What a context or a worker with a connection opens, with room to spare.
const DESCRIPTORS: usize = 40;

/// Tries it: opens so many and closes them again.
///
/// # Errors
/// `Capacity` when there are not so many left.
pub(crate) fn check(operation: &'static str) -> Result<()> {
    let open = || File::open("/dev/null").ok();
    let opened: Vec<File> = std::iter::repeat_with(open)
        .take(DESCRIPTORS)
        .map_while(|file| file)
        .collect();
    if opened.len() == DESCRIPTORS {
        return Ok(());
    }
    let message = format!("`{}` descriptors are left, UCX may need `{DESCRIPTORS}`", opened.len());
    Err(Error::new(ErrorKind::Capacity, operation, message).with_hint("raise the limit of open files (`ulimit -n`)"))
}

/// Descriptors that a worker keeps so that its end has some, however few the process has left by then.
pub(crate) struct Reserve {
    _files: [File; RESERVED],
}

/// What taking a worker apart opens: a socket that asks for the state of its adapter, with one to spare.
const RESERVED: usize = 2;

impl Reserve {
    /// # Errors
    /// `Capacity` when there are not so many left.
    pub(crate) fn take(operation: &'static str) -> Result<Self> {
        let open = || {
            File::open("/dev/null").map_err(|error| {
                Error::new(
                    ErrorKind::Capacity,
                    operation,
                    format!("`/dev/null` can't be opened: {error}"),
                )
            })
        };
        Ok(Self {
            _files: [open()?, open()?],
        })
    }
}
