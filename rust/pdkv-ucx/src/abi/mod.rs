//! The C side of UCP and UCS as this crate uses it: types, constants and function types, written by hand.
//!
//! UCX grows its structs at the end and says by a mask which fields it may read, so one table fits every
//! version from 1.13 on: each struct is zeroed whole, then filled, and its mask names what was filled.
//! `probe.rs` compiles a C program against installed headers and compares every size, offset and
//! constant with this. Nothing here calls anything.

pub(crate) mod constants;
pub(crate) mod functions;
#[cfg(test)]
mod probe;
pub(crate) mod sgl;
pub(crate) mod structs;

pub(crate) use functions::{Ucp, Ucs};
pub(crate) use structs::*;
