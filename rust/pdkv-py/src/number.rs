//! Numbers that Python hands over. A whole one outside its range is an error of pdkv with the argument's name in it,
//! not Python's bare `OverflowError`; something that is no integer stays Python's `TypeError`.

use pdkv_core::{Error, ErrorKind};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::errors;

/// Reads `object` as the unsigned integer `T`.
fn read<T: TryFrom<i128>>(object: &Bound<'_, PyAny>, kind: ErrorKind, name: &'static str) -> PyResult<T> {
    let refused = || {
        let most = u64::MAX >> (64 - 8 * size_of::<T>());
        let error = Error::new(kind, name, format!("`{name}` is `{object}`"))
            .with_hint(format!("give a whole number from 0 to {most}"));
        errors::to_python(object.py(), &error)
    };
    match object.extract::<i128>() {
        Ok(number) => T::try_from(number).map_err(|_| refused()),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Err(refused()),
        Err(error) => Err(error),
    }
}

/// One function for each argument, for `from_py_with`: what the error calls it, its type, and its kind of error.
macro_rules! arguments {
    ($( $kind:ident { $( $function:ident $name:literal $type:ty ),+ $(,)? } )+) => { $( $(
        pub(crate) fn $function(object: &Bound<'_, PyAny>) -> PyResult<$type> {
            read(object, ErrorKind::$kind, $name)
        }
    )+ )+ };
}

/// The same for arguments that may be `None`.
macro_rules! optional {
    ($( $kind:ident { $( $function:ident $name:literal $type:ty ),+ $(,)? } )+) => { $( $(
        pub(crate) fn $function(object: &Bound<'_, PyAny>) -> PyResult<Option<$type>> {
            (!object.is_none()).then(|| read(object, ErrorKind::$kind, $name)).transpose()
        }
    )+ )+ };
}

arguments! {
    Config {
        allocation "nbytes" u64,
        consumers "consumers" u32,
        seed "seed" u64,
        entry "entry" u64,
        engines "engines" usize,
        exports "exports" usize,
        blocks "blocks" u32,
        simulated_layers "layers" u32,
        limit_bytes "limit_bytes" u64,
    }
    Layout {
        block_tokens "block_tokens" u32,
        first_block "first_block" u32,
        num_blocks "num_blocks" u32,
        issued_tokens "num_tokens" u64,
        num_layers "num_layers" u32,
        num_heads "num_heads" u32,
        first_layer "first_layer" u32,
        first_head "first_head" u32,
        tp_rank "tp_rank" u32,
        tp_size "tp_size" u32,
        pp_rank "pp_rank" u32,
        pp_size "pp_size" u32,
        layer "layers" u32,
        itemsize "itemsize" u64,
    }
    Region {
        offset "offset" u64,
        nbytes "nbytes" u64,
        address "address" u64,
    }
}

optional! {
    Config {
        stated_consumers "consumers" u32,
        threads "threads" usize,
        tcp_streams "tcp_streams" usize,
        max_item_bytes "max_item_bytes" u64,
        staging_bytes "staging_bytes" u64,
    }
    Layout {
        num_tokens "num_tokens" u64,
        total_layers "total_layers" u32,
        total_heads "total_heads" u32,
    }
}

/// Reads `(first, count)` of layers.
pub(crate) fn layers(object: &Bound<'_, PyAny>) -> PyResult<Option<(u32, u32)>> {
    if object.is_none() {
        return Ok(None);
    }
    let (first, count): (Bound<'_, PyAny>, Bound<'_, PyAny>) = object.extract()?;
    Ok(Some((layer(&first)?, layer(&count)?)))
}

/// Reads the extents or the strides of a tensor.
pub(crate) fn extents(object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    object.extract().map_err(|error: PyErr| {
        if !error.is_instance_of::<PyOverflowError>(object.py()) {
            return error;
        }
        let text = format!("`{object}` holds numbers that no tensor has");
        errors::to_python(object.py(), &Error::new(ErrorKind::Layout, "send", text))
    })
}

/// Reads seconds. What is too large for a float becomes infinite, which `enter::duration` refuses by name.
pub(crate) fn seconds(object: &Bound<'_, PyAny>) -> PyResult<f64> {
    object.extract().or_else(|error: PyErr| {
        let too_large = error.is_instance_of::<PyOverflowError>(object.py());
        if too_large { Ok(f64::INFINITY) } else { Err(error) }
    })
}

/// The same where they may be `None`.
pub(crate) fn optional_seconds(object: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    (!object.is_none()).then(|| seconds(object)).transpose()
}
