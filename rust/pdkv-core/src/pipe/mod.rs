//! What goes through a pipe: a FIFO of items from one engine to another, over a stream of its own.
//!
//! An item is a tag of the application's and, if it has one, a tensor: the name of a dtype, a shape and the bytes in
//! row-major order. Here are the frames that both ends exchange, and where the bytes of a strided tensor lie. This
//! module knows no socket, no memory and no dtype: names and tags are the application's affair.

mod down;
mod frame;
mod strided;
mod up;

pub use down::{ItemHead, TensorHead, ToReceiver};
pub use frame::HEADER;
pub use strided::Strided;
pub use up::ToSender;

/// Items of at most this many bytes travel inside the stream; what is larger, the sender writes into memory that the
/// receiver names.
pub const INLINE_MAX: usize = 64 << 10;
/// Longest name of a pipe.
pub const MAX_CHANNEL: usize = 128;
/// Longest tag of an item.
pub const MAX_TAG: usize = 64 << 10;
/// Longest name of a dtype.
pub const MAX_DTYPE: usize = 24;
/// Most dimensions of a tensor.
pub const MAX_DIMS: usize = 32;
/// Most bytes of a tensor.
pub const MAX_ITEM: u64 = 1 << 48;
/// Longest reason in a frame; what is longer is cut by the sender.
pub const MAX_TEXT: usize = 4096;
/// Most bytes of one frame, whatever it holds.
pub const MAX_FRAME: usize = HEADER + down::ITEM_FIXED + 8 * MAX_DIMS + MAX_DTYPE + MAX_TAG + INLINE_MAX;
