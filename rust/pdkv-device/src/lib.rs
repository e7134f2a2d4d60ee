//! Memory and copies on one host: regions, shared pools, adoption, vectored kernel copies, and
//! gather/scatter between sockets and pages.
//!
//! This is the crate where `unsafe` lives. It knows no KV word: no block, no layer, no transfer.
