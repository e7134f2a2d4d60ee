//! Layouts, plans and walks against a naive oracle that computes the address of every byte.

mod caches;
mod golden;
mod packed;
mod pages;
mod scale;
mod spans;
mod walks;
