//! Where the bytes of a strided tensor lie, in row-major order.
//!
//! Dimensions that continue one another are one; what is left of the innermost, if it is dense, is a run. Offsets count
//! from the lowest byte that the tensor has, since strides may be negative.

use super::MAX_DIMS;
use crate::{Error, ErrorKind, Result};

/// A tensor's bytes as runs of equal length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Outermost first: extent, and bytes from one to the next. Empty when the tensor is dense.
    dims: Vec<(u64, i64)>,
    run_bytes: u64,
    runs: u64,
    below: u64,
    reach: u64,
}

impl Strided {
    /// The tensor with this shape and these strides, in elements of `itemsize` bytes.
    ///
    /// # Errors
    /// `Layout` when the lists don't pair up, an element has no bytes, or the tensor reaches farther than memory does.
    pub fn new(shape: &[u64], strides: &[i64], itemsize: u64) -> Result<Self> {
        if shape.len() != strides.len() || shape.len() > MAX_DIMS {
            return Err(refuse(format!(
                "`{}` extents and `{}` strides, at most `{MAX_DIMS}` of each pair up",
                shape.len(),
                strides.len()
            )));
        }
        if itemsize == 0 {
            return Err(refuse("an element has no bytes".to_owned()));
        }
        let mut dims = Vec::with_capacity(shape.len());
        if shape.contains(&0) {
            return Ok(Self {
                dims,
                run_bytes: 0,
                runs: 0,
                below: 0,
                reach: 0,
            });
        }
        let too_far = || {
            refuse(format!(
                "shape {shape:?} with strides {strides:?} reaches past all memory"
            ))
        };
        let item = i64::try_from(itemsize).map_err(|_| too_far())?;
        let (mut below, mut above, mut total) = (0_u64, itemsize, itemsize);
        for (&extent, &stride) in shape.iter().zip(strides) {
            total = total.checked_mul(extent).ok_or_else(too_far)?;
            if extent == 1 {
                continue;
            }
            let step = stride.checked_mul(item).ok_or_else(too_far)?;
            let far = step.unsigned_abs().checked_mul(extent - 1).ok_or_else(too_far)?;
            let side = if step < 0 { &mut below } else { &mut above };
            *side = side.checked_add(far).ok_or_else(too_far)?;
            merge(&mut dims, extent, step);
        }
        let reach = below
            .checked_add(above)
            .filter(|&bytes| i64::try_from(bytes).is_ok() && i64::try_from(total).is_ok());
        let reach = reach.ok_or_else(too_far)?;
        let run_bytes = match dims.last() {
            Some(&(extent, step)) if step == item => {
                dims.pop();
                extent * itemsize
            }
            _ => itemsize,
        };
        Ok(Self {
            runs: total / run_bytes,
            dims,
            run_bytes,
            below,
            reach,
        })
    }

    /// All bytes of the tensor.
    pub fn nbytes(&self) -> u64 {
        self.run_bytes * self.runs
    }

    /// Bytes of one run.
    pub fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// How many runs there are.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Whether the bytes lie in one piece, in order.
    pub fn is_dense(&self) -> bool {
        self.dims.is_empty()
    }

    /// Bytes between the lowest byte and the first element.
    pub fn below(&self) -> u64 {
        self.below
    }

    /// Bytes from the lowest to the highest, both included.
    pub fn reach(&self) -> u64 {
        self.reach
    }

    /// The dimensions outside a run, outermost first: extent, and bytes from one to the next.
    pub fn dims(&self) -> &[(u64, i64)] {
        &self.dims
    }

    /// Where runs begin, from number `first` on, counted from the lowest byte.
    pub fn offsets(&self, first: u64) -> Offsets<'_> {
        let mut index = [0; MAX_DIMS];
        let mut rest = first.min(self.runs);
        let mut at = self.below;
        for (slot, &(extent, step)) in index[..self.dims.len()].iter_mut().zip(&self.dims).rev() {
            *slot = rest % extent;
            rest /= extent;
            at = at.wrapping_add_signed(step.wrapping_mul(slot.cast_signed()));
        }
        Offsets {
            strided: self,
            index,
            at,
            left: self.runs - first.min(self.runs),
        }
    }
}

/// Adds a dimension inside the others, or lengthens the innermost by it.
fn merge(dims: &mut Vec<(u64, i64)>, extent: u64, step: i64) {
    if let Some(outer) = dims.last_mut() {
        let whole = i64::try_from(extent).ok().and_then(|extent| step.checked_mul(extent));
        if whole == Some(outer.1) {
            *outer = (outer.0 * extent, step);
            return;
        }
    }
    dims.push((extent, step));
}

/// The first bytes of runs, one after the other.
#[derive(Clone, Debug)]
pub struct Offsets<'a> {
    strided: &'a Strided,
    index: [u64; MAX_DIMS],
    at: u64,
    left: u64,
}

impl Iterator for Offsets<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        let at = self.at;
        let dims = &self.strided.dims;
        for (slot, &(extent, step)) in self.index[..dims.len()].iter_mut().zip(dims).rev() {
            *slot += 1;
            self.at = self.at.wrapping_add_signed(step);
            if *slot < extent {
                break;
            }
            self.at = self
                .at
                .wrapping_add_signed(step.wrapping_mul(extent.cast_signed()).wrapping_neg());
            *slot = 0;
        }
        Some(at)
    }
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Layout, "send", message)
}
