//! Whether memory of GPUs that an owner's allocator may replace is still the memory that was registered: the owner's process says so, region by region,
//! whenever it is asked; over the local socket where it is on this host ([`far_look`](crate::far_look) elsewhere). Its driver may be slow, and so may
//! the answer be.

use std::collections::BTreeMap;
use std::time::Duration;

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::Witnesses;

use crate::door::LocalDoor;
use crate::far_look::FarLook;
use crate::lend::{Answer, END, Head, send_head, send_refusal};
use crate::local::{Ask, Asker, refuse};

/// Those who ask wait as long as the owner lives and their transfers may run.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// How the engine of a peer is asked.
pub(crate) enum Inquiry {
    /// It is on this host.
    Near(LocalDoor),
    /// It is on another, or its local socket can't be reached.
    Far(FarLook),
}

impl Inquiry {
    /// Asks whether these regions are where they were; says of each that is not, once, what the owner says.
    ///
    /// # Errors
    /// What kept the owner from saying it of all: `PeerUnreachable`, `PeerLost`, `TransferCancelled` when told to stop, `Capacity`, and `Handshake` or
    /// `Integrity` for an answer that is none.
    pub(crate) fn still_there(
        &self,
        wanted: &[(RegionId, u64)],
        stopped: &dyn Fn() -> bool,
        gone: &mut dyn FnMut(RegionId, Error),
    ) -> Result<()> {
        match self {
            Self::Near(door) => door.in_turn(stopped, || door.still_there(wanted, stopped, gone)),
            Self::Far(far) => far.still_there(wanted, stopped, gone),
        }
    }

    /// Nobody will ask any more.
    pub(crate) fn shut_down(&self) {
        match self {
            // It is shut with its peer.
            Self::Near(_) => {}
            Self::Far(far) => far.shut_down(),
        }
    }
}

impl LocalDoor {
    fn still_there(
        &self,
        wanted: &[(RegionId, u64)],
        stopped: &dyn Fn() -> bool,
        gone: &mut dyn FnMut(RegionId, Error),
    ) -> Result<()> {
        let mut answer = Answer(self.question(Ask::Look, wanted, stopped)?);
        answer.0.bear_with(PATIENCE);
        let mut open: BTreeMap<RegionId, u64> = wanted.iter().copied().collect();
        loop {
            let head = answer.head()?;
            if head.id == END {
                break;
            }
            // Each once: an owner can't keep us here for ever.
            let id = RegionId(head.id);
            open.remove(&id)
                .ok_or_else(|| refuse("a region came that was not asked for"))?;
            if let Some(error) = verdict(&head) {
                gone(id, error);
            }
        }
        match open.keys().next() {
            None => Ok(()),
            Some(id) => Err(refuse(&format!("nothing was said of region `{id}`"))),
        }
    }
}

/// What a head says of its region: one extent is what was registered.
fn verdict(head: &Head) -> Option<Error> {
    if head.not_now {
        return Some(untold(RegionId(head.id), &head.reason));
    }
    (head.count != 1).then(|| replaced(RegionId(head.id), &head.reason))
}

/// The owner looked and found something else.
pub(crate) fn replaced(id: RegionId, reason: &str) -> Error {
    let text = format!("region `{id}` of the peer is not what it was: {reason}");
    Error::new(ErrorKind::Region, "fence", text)
        .with_hint("its owner registers it anew after its allocator has moved it")
}

/// The owner could not look.
pub(crate) fn untold(id: RegionId, reason: &str) -> Error {
    let text = format!("the peer could not tell whether region `{id}` is where it was: {reason}");
    Error::new(ErrorKind::Transfer, "fence", text)
}

/// Looks at the regions that the peer asks about.
pub(crate) fn look(asker: &Asker<'_>) -> Result<()> {
    let ids = asker.wanted()?;
    let regions: Vec<_> = ids
        .into_iter()
        .map(|id| (id, asker.shared.registry.region_for(asker.peer, id)))
        .collect();
    let devices = || {
        let known = regions.iter().filter_map(|(_, region)| region.as_ref().ok());
        known.filter_map(|region| region.memory.device())
    };
    // Each allocation once, however many of the regions lie in it; one by one only where something has moved.
    let all = Witnesses::of(devices()).still_there();
    for (id, region) in &regions {
        let found = match (region, &all) {
            (Err(error), _) => Err(error.clone()),
            (Ok(_), Ok(())) => Ok(()),
            (Ok(region), Err(_)) => region.memory.device().map_or(Ok(()), |device| device.still_there()),
        };
        match found {
            Ok(()) => send_head(asker, id.0, 1, "")?,
            Err(error) => send_refusal(asker, *id, &error)?,
        }
    }
    send_head(asker, END, 0, "")
}
