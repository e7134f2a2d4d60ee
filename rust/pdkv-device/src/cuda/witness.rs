//! Whether memory that somebody else allocated is still the memory that was registered.
//!
//! An allocator may put other memory at the same addresses (vLLM's sleep mode); then a peer's mapping shows what was there before, and our own
//! copies touch what is nobody's business. The driver numbers its allocations and never gives a number twice, so a look at the numbers tells.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pdkv_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::facts::{Identity, identity};
use super::gpu::Gpu;
use super::region::{DeviceRegion, Piece};

/// More allocations than this under one region are looked at here and there: an allocator that moves memory moves all of it.
const MOST_OF_ONE: usize = 16;
/// The same for all that is looked at together.
const MOST_OF_ALL: usize = 64;
/// How many of them a glance looks at.
const GLANCE: usize = 4;

/// An address, and the numbers of the memory that was there.
pub(super) type Witness = (u64, Identity);

/// Which allocations lie under a region now.
///
/// # Errors
/// `Device` when the driver fails.
pub(super) fn witnesses(context: &Context, pieces: &[Piece]) -> Result<Vec<Witness>> {
    let entered = context.enter()?;
    let some = pieces.iter().step_by(pieces.len().div_ceil(MOST_OF_ONE).max(1));
    some.map(|piece| Ok((piece.base, identity(context, &entered, piece.base)?)))
        .collect()
}

/// The allocations under several regions, each once, however many of the regions lie in it.
#[derive(Debug, Default)]
pub struct Witnesses {
    groups: Vec<(Gpu, Vec<Witness>)>,
    /// How often somebody glanced.
    glances: AtomicUsize,
}

impl Witnesses {
    /// Those of these regions. Memory of pdkv's own has none, for nobody else can move it.
    pub fn of<'a>(regions: impl IntoIterator<Item = &'a Arc<DeviceRegion>>) -> Self {
        let mut found: BTreeMap<u32, (Gpu, BTreeMap<u64, Identity>)> = BTreeMap::new();
        for region in regions {
            let gpu = region.gpu();
            let (_, places) = found
                .entry(gpu.ordinal())
                .or_insert_with(|| (gpu.clone(), BTreeMap::new()));
            places.extend(region.witnesses().iter().copied());
        }
        let thin = |(gpu, places): (Gpu, BTreeMap<u64, Identity>)| {
            let every = places.len().div_ceil(MOST_OF_ALL).max(1);
            (gpu, places.into_iter().step_by(every).collect::<Vec<_>>())
        };
        let groups = found.into_values().map(thin);
        Self {
            groups: groups.filter(|(_, places)| !places.is_empty()).collect(),
            glances: AtomicUsize::new(0),
        }
    }

    /// Whether there is nothing to look at.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Whether all of it is still the memory that was registered. Some dozens of look-ups, however large the memory is.
    ///
    /// # Errors
    /// `Region` when it is not, `Device` when the driver fails.
    pub fn still_there(&self) -> Result<()> {
        let mut groups = self.groups.iter();
        groups.try_for_each(|(gpu, places)| check(gpu.context(), places))
    }

    /// The same by a few of the allocations, other ones each time: what it costs does not grow with their number. An allocator that moves
    /// memory moves all of it.
    ///
    /// # Errors
    /// As [`still_there`](Self::still_there).
    pub fn glance(&self) -> Result<()> {
        let turn = self.glances.fetch_add(1, Ordering::Relaxed);
        self.groups.iter().try_for_each(|(gpu, places)| {
            let every = places.len().div_ceil(GLANCE).max(1);
            check(gpu.context(), places.iter().skip(turn % every).step_by(every))
        })
    }
}

/// Whether these allocations are where they were.
///
/// # Errors
/// As [`Witnesses::still_there`].
pub(super) fn check<'a>(context: &Context, places: impl IntoIterator<Item = &'a Witness>) -> Result<()> {
    let mut places = places.into_iter().peekable();
    if places.peek().is_none() {
        return Ok(());
    }
    let entered = context.enter()?;
    for &(address, was) in places {
        if identity(context, &entered, address)? != was {
            let message = format!("there is other memory at `{address:#x}` than when it was registered");
            return Err(Error::new(ErrorKind::Region, "use GPU memory", message)
                .with_hint("register the cache anew after its allocator has moved it"));
        }
    }
    Ok(())
}
