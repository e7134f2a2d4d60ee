//! What the sender of a pipe says.

use super::frame::{begin, finish, garbage, kind_of, split, string, text, word, word32, words};
use super::{INLINE_MAX, MAX_CHANNEL, MAX_DIMS, MAX_DTYPE, MAX_ITEM, MAX_TAG, MAX_TEXT};
use crate::{Error, ErrorKind, Result, Retry};

/// Bytes of an item's body before its lists: number, bytes, tag's length, dtype's, dimensions, flags, a zero.
pub(super) const ITEM_FIXED: usize = 24;

const OPEN: u8 = 1;
const ITEM: u8 = 2;
const PLACED: u8 = 3;
const FAILED: u8 = 4;
const BYE: u8 = 5;

/// There is a tensor.
const TENSOR: u8 = 1;
/// Its bytes follow in this frame.
const INLINE: u8 = 2;

/// One frame from the sender to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToReceiver<'a> {
    /// First of all: the pipe's name.
    Open {
        /// The name both ends know.
        channel: &'a [u8],
    },
    /// The next item.
    Item {
        /// What it is.
        head: ItemHead<'a>,
        /// The bytes of its tensor; `None` when the sender waits to be told where to write them.
        inline: Option<&'a [u8]>,
    },
    /// The bytes of an item lie where the receiver wanted them.
    Placed {
        /// The item's number.
        seq: u64,
    },
    /// The pipe is over: an item can't be delivered, or the sender gave up. Nothing of the sender's writes any more.
    Failed {
        /// What kind of error the receiver should see.
        kind: ErrorKind,
        /// Why.
        reason: &'a str,
    },
    /// The pipe is over: everything was sent.
    Bye {
        /// How many items there were.
        items: u64,
    },
}

/// What an item is, its bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemHead<'a> {
    /// Its number in the pipe, from 0 on.
    pub seq: u64,
    /// The application's bytes.
    pub tag: &'a [u8],
    /// The tensor, if there is one.
    pub tensor: Option<TensorHead<'a>>,
}

/// What a tensor is, its bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorHead<'a> {
    /// The name of its dtype: lowercase letters, digits and underscores.
    pub dtype: &'a str,
    shape: Shape<'a>,
    /// Its bytes.
    pub nbytes: u64,
}

/// A shape as it came, or as it is to go.
#[derive(Clone, Copy, Debug)]
enum Shape<'a> {
    Numbers(&'a [u64]),
    Wire(&'a [u8]),
}

impl PartialEq for Shape<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Shape<'_> {}

impl Shape<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Numbers(list) => list.len(),
            Self::Wire(raw) => raw.len() / 8,
        }
    }

    fn iter(&self) -> impl Iterator<Item = u64> {
        (0..self.len()).map(|at| match self {
            Self::Numbers(list) => list[at],
            Self::Wire(raw) => word(raw, at * 8),
        })
    }
}

impl<'a> TensorHead<'a> {
    /// A tensor of this dtype and shape, `itemsize` bytes an element.
    ///
    /// # Errors
    /// `Layout` for a name that is no dtype's, too many dimensions or more bytes than any tensor has.
    pub fn new(dtype: &'a str, shape: &'a [u64], itemsize: u64) -> Result<Self> {
        if !is_dtype(dtype.as_bytes()) {
            return Err(refuse(format!("`{dtype}` is no name of a dtype"))
                .with_hint("lowercase letters, digits and underscores, at most 24"));
        }
        if shape.len() > MAX_DIMS {
            return Err(refuse(format!(
                "a tensor of `{}` dimensions, at most `{MAX_DIMS}` are sent",
                shape.len()
            )));
        }
        let shape = Shape::Numbers(shape);
        let nbytes = elements(&shape)
            .and_then(|count| count.checked_mul(itemsize))
            .filter(|&bytes| bytes <= MAX_ITEM)
            .ok_or_else(|| refuse("the tensor is larger than any memory".to_owned()))?;
        Ok(Self { dtype, shape, nbytes })
    }

    /// The extents, outermost first.
    pub fn shape(&self) -> impl Iterator<Item = u64> {
        self.shape.iter()
    }

    /// How many extents there are.
    pub fn dims(&self) -> usize {
        self.shape.len()
    }
}

/// The number of elements, if it can be counted.
fn elements(shape: &Shape<'_>) -> Option<u64> {
    // One extent of 0 makes it empty, whatever the others say.
    if shape.iter().any(|extent| extent == 0) {
        return Some(0);
    }
    shape.iter().try_fold(1_u64, u64::checked_mul)
}

fn is_dtype(name: &[u8]) -> bool {
    let known = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'_';
    (1..=MAX_DTYPE).contains(&name.len()) && name.iter().all(known)
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Layout, "send", message)
}

impl<'a> ItemHead<'a> {
    /// Appends the frame of this item, but for the tensor's bytes, which the caller appends if they are to be inline.
    ///
    /// # Errors
    /// `Capacity` when the tag is too long; nothing was appended then.
    pub fn begin(&self, out: &mut Vec<u8>, inline: bool) -> Result<()> {
        if self.tag.len() > MAX_TAG {
            let text = format!("a tag of `{}` bytes, at most `{MAX_TAG}` are sent", self.tag.len());
            return Err(Error::new(ErrorKind::Capacity, "send", text).with_retry(Retry::Never));
        }
        let nbytes = self.tensor.map_or(0, |tensor| tensor.nbytes);
        debug_assert!(!inline || nbytes <= INLINE_MAX as u64, "the caller chose");
        let start = begin(out, ITEM);
        words(out, &[self.seq, nbytes]);
        out.extend_from_slice(&(self.tag.len() as u32).to_le_bytes());
        let flags = (u8::from(self.tensor.is_some()) * TENSOR) | (u8::from(inline) * INLINE);
        let (dtype, dims) = self.tensor.map_or(("", 0), |tensor| (tensor.dtype, tensor.dims()));
        out.extend_from_slice(&[dtype.len() as u8, dims as u8, flags, 0]);
        if let Some(tensor) = &self.tensor {
            for extent in tensor.shape() {
                words(out, &[extent]);
            }
        }
        out.extend_from_slice(dtype.as_bytes());
        out.extend_from_slice(self.tag);
        finish(out, start, if inline { nbytes as usize } else { 0 });
        Ok(())
    }

    /// Reads the body of an item; with it the tensor's bytes, if they are inline.
    fn read(raw: &'a [u8]) -> Result<(Self, Option<&'a [u8]>)> {
        let (seq, nbytes, tag_len) = (word(raw, 0), word(raw, 8), word32(raw, 16) as usize);
        let (dtype_len, dims, flags, zero) = (usize::from(raw[20]), usize::from(raw[21]), raw[22], raw[23]);
        if tag_len > MAX_TAG || dims > MAX_DIMS {
            return Err(garbage("tag length or number of dimensions", dims as u64));
        }
        let (tensor, inline) = (flags & TENSOR != 0, flags & INLINE != 0);
        if flags & !(TENSOR | INLINE) != 0 || zero != 0 || (inline && !tensor) {
            return Err(garbage("item flags", u64::from(flags)));
        }
        if nbytes > if inline { INLINE_MAX as u64 } else { MAX_ITEM } {
            return Err(garbage("number of bytes", nbytes));
        }
        let payload = if inline { nbytes as usize } else { 0 };
        let wanted = ITEM_FIXED + 8 * dims + dtype_len + tag_len + payload;
        if raw.len() != wanted {
            return Err(garbage("item length", raw.len() as u64));
        }
        let (shape, rest) = raw[ITEM_FIXED..].split_at(8 * dims);
        let (dtype, rest) = rest.split_at(dtype_len);
        let (tag, bytes) = rest.split_at(tag_len);
        let head = |tensor| Self { seq, tag, tensor };
        if !tensor {
            if nbytes != 0 || dims != 0 || dtype_len != 0 {
                return Err(garbage("tensor of an item without one", nbytes));
            }
            return Ok((head(None), None));
        }
        if !is_dtype(dtype) {
            return Err(garbage("dtype name of bytes", dtype_len as u64));
        }
        let shape = Shape::Wire(shape);
        // The size of an element is the dtype's affair, but a whole number it is.
        let fits = match elements(&shape) {
            Some(0) => nbytes == 0,
            Some(count) => nbytes % count == 0,
            None => false,
        };
        // What is not inline is to be placed, and nothing can't be.
        if !fits || (!inline && nbytes == 0) {
            return Err(garbage("number of bytes for its shape", nbytes));
        }
        let tensor = TensorHead {
            dtype: string(dtype)?,
            shape,
            nbytes,
        };
        Ok((head(Some(tensor)), inline.then_some(bytes)))
    }
}

impl<'a> ToReceiver<'a> {
    /// Appends the frame.
    ///
    /// # Errors
    /// `Capacity` when the channel's name or a tag is too long.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<()> {
        let start = match self {
            Self::Open { channel } => {
                if channel.len() > MAX_CHANNEL {
                    let text = format!(
                        "a channel's name of `{}` bytes, at most `{MAX_CHANNEL}` are sent",
                        channel.len()
                    );
                    return Err(Error::new(ErrorKind::Capacity, "open_pipe", text).with_retry(Retry::Never));
                }
                let start = begin(out, OPEN);
                out.extend_from_slice(channel);
                start
            }
            Self::Item { head, inline } => {
                head.begin(out, inline.is_some())?;
                out.extend_from_slice(inline.unwrap_or_default());
                return Ok(());
            }
            Self::Placed { seq } => {
                let start = begin(out, PLACED);
                words(out, &[*seq]);
                start
            }
            Self::Failed { kind, reason } => {
                let start = begin(out, FAILED);
                words(out, &[*kind as u64]);
                text(out, reason);
                start
            }
            Self::Bye { items } => {
                let start = begin(out, BYE);
                words(out, &[*items]);
                start
            }
        };
        finish(out, start, 0);
        Ok(())
    }

    /// The frame at the start of `input` and its bytes; `None` when more must come first.
    ///
    /// # Errors
    /// `Integrity` for anything that [`encode`](Self::encode) doesn't write.
    pub fn decode(input: &'a [u8]) -> Result<Option<(Self, usize)>> {
        let bounds = |kind| match kind {
            OPEN => Some((0, MAX_CHANNEL)),
            ITEM => Some((ITEM_FIXED, super::MAX_FRAME - super::HEADER)),
            PLACED | BYE => Some((8, 8)),
            FAILED => Some((8, 8 + MAX_TEXT)),
            _ => None,
        };
        let Some((kind, body, used)) = split(input, bounds)? else {
            return Ok(None);
        };
        let frame = match kind {
            OPEN => Self::Open { channel: body },
            ITEM => {
                let (head, inline) = ItemHead::read(body)?;
                Self::Item { head, inline }
            }
            PLACED => Self::Placed { seq: word(body, 0) },
            BYE => Self::Bye { items: word(body, 0) },
            _ => Self::Failed {
                kind: kind_of(word(body, 0))?,
                reason: string(&body[8..])?,
            },
        };
        Ok(Some((frame, used)))
    }

    /// The name in messages about frames that came at the wrong time.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "open",
            Self::Item { .. } => "item",
            Self::Placed { .. } => "placed",
            Self::Failed { .. } => "failed",
            Self::Bye { .. } => "bye",
        }
    }
}
