//! Finds out what carries memory of GPUs, on a lane made for that and for nothing else: a copy that nobody carries out takes its worker along, and
//! no transfer should be on it then.
//!
//! Only gets are tried, from the first bytes of a region into pages of our own that nobody looks at: a put would write into somebody's memory. Where an
//! adapter reads, it writes as well; that it does is seen by the first piece of each transfer's pair of regions (`puts.rs`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pdkv_core::lane::{Carrier, Manner};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{DeviceRegion, Gpu};
use pdkv_device::{HostRegion, HugePages, Memory};
use pdkv_ucx::{RemoteKey, Tally};

use super::codec::{Frame, misplaced};
use super::desk::Desk;
use super::devices::{Sides, Subject, Way};
use super::door::{Made, by};
use super::verdict::{carrier_of, names, worst};

/// How long the peer may take for one pair of sides.
const PATIENCE: Duration = Duration::from_secs(8);
/// Bytes of our own that are got into.
const PAGE: u64 = 64 << 10;
/// Gets of so many bytes, as far as the region has them: UCX may do each in another way.
const SIZES: [u64; 2] = [64, PAGE];

/// Tries each pair of sides. What is missing at the end was not come to.
pub(super) fn run(desk: &mut Desk, made: &Made, subjects: &[Subject], mut settle: impl FnMut(Sides, Result<Way>)) {
    for subject in subjects {
        let outcome = try_one(desk, made, subject);
        let over = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::PeerLost);
        settle(subject.sides, outcome);
        if over {
            return;
        }
    }
}

fn try_one(desk: &mut Desk, made: &Made, subject: &Subject) -> Result<Way> {
    let deadline = Instant::now() + PATIENCE;
    if made.manner != Manner::OneSided {
        return Err(unsupported(format!(
            "it goes by put and get only, and this is {}",
            made.detail
        )));
    }
    let endpoint = made.endpoint.as_ref().ok_or_else(super::puts::no_endpoint)?;
    let local = made.context.map(&page(subject.gpu.as_ref())?)?;
    let remote = ask_for_key(desk, made, subject, deadline)?;
    let policy = desk.shared.config.ucx.one_sided;
    let tally = Tally::new(&made.worker);
    let mut found = Vec::new();
    for len in SIZES.map(|len| len.min(subject.region.len())) {
        let probe = endpoint.probe_get(&local, 0, &remote, 0, len, &tally)?;
        let carrier = carrier_of(&probe);
        found.push((carrier, names(&probe.transports)));
        if !policy.allows(carrier) {
            // Nobody may be there to carry it out, so it is not waited for.
            let (carrier, over) = worst(found);
            return Err(refused(carrier, &over, policy.as_str()));
        }
        desk.until(&made.worker, deadline, || {
            tally.outstanding() == 0 || endpoint.failure().is_some()
        })?;
        tally.failure().or_else(|| endpoint.failure()).map_or(Ok(()), Err)?;
    }
    Ok(worst(found))
}

/// The key of a region, as any transfer asks for it.
fn ask_for_key(desk: &mut Desk, made: &Made, subject: &Subject, deadline: Instant) -> Result<RemoteKey> {
    let wanted = subject.region.id;
    desk.send(&Frame::WantKey { region: wanted })?;
    match desk.next(Some(&made.worker), deadline)? {
        Frame::Key { region, base, len, key } if region == wanted && len == subject.region.len() => {
            let endpoint = made.endpoint.as_ref().ok_or_else(super::puts::no_endpoint)?;
            endpoint.unpack(&key, base, len)
        }
        Frame::NoKey { region, reason } if region == wanted => Err(unsupported(format!("the peer: {reason}"))),
        other => Err(misplaced(&other)),
    }
}

/// Memory to get into. That of a GPU is kept for the life of the process: to free it would wait for all that the GPU has to do.
fn page(gpu: Option<&Gpu>) -> Result<Memory> {
    static PAGES: Mutex<Vec<Arc<DeviceRegion>>> = Mutex::new(Vec::new());
    let Some(gpu) = gpu else {
        return Ok(HostRegion::allocate(PAGE, HugePages::Never)?.into());
    };
    let mut pages = PAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(page) = pages.iter().find(|page| page.gpu().uuid() == gpu.uuid()) {
        return Ok(Arc::clone(page).into());
    }
    let page = DeviceRegion::allocate(gpu, PAGE)?;
    pages.push(Arc::clone(&page));
    Ok(page.into())
}

/// The refusal of what would carry it.
pub(super) fn refused(carrier: Carrier, over: &str, policy: &str) -> Error {
    unsupported(format!("{}, `one_sided` is `{policy}`", by(carrier, over))).with_hint(HINT)
}

const HINT: &str = "an adapter reaches a GPU's memory by DMA-BUF or by the kernel module `nvidia-peermem`; `pdkv doctor` says what is here";

pub(super) fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, "lane", message)
}
