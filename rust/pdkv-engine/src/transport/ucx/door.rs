//! How a lane comes to be: the initiator knocks, the owner answers, and both agree on a manner before a
//! payload byte moves.
//!
//! One-sided is tried first where the initiator's policy could allow it: puts and gets in memory that the owner
//! lends for them show what UCX really does, and both policies judge that. Whatever comes of it but a yes
//! leads to active messages, on workers that have no one-sided copies at all. Nor has the owner's on a one-sided
//! lane, unless its policy is to carry out whatever comes.

use std::time::{Duration, Instant};

use pdkv_core::id::PeerKey;
use pdkv_core::lane::{Carrier, Manner, OneSidedPolicy};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{HostRegion, HugePages};
use pdkv_ucx::{Context, Delivery, Endpoint, ErrorMode, Inbox, InboxLimits, Resource, Span, Tally, Worker};

use super::codec::{Frame, Mode, misplaced};
use super::desk::Desk;
use super::runtime::{has_adapters, unwanted};
use super::verdict::{carrier_of, names, takes_lists, worst};

/// The id of our active messages.
pub(super) const MESSAGES: u16 = 0x70;
/// The first message each way: it proves the connection and asks for nothing.
pub(super) const HELLO: [u8; 8] = [0; 8];
/// How long a side channel may stay silent at first: its initiator may have to load UCX before it can speak.
const FIRST_WORD: Duration = Duration::from_secs(15);
/// Offers that an owner looks at before it gives up on an initiator.
const MAX_OFFERS: usize = 3;
/// How long puts and gets are tried: an owner that carries out no emulated ones never answers those. Who does answers
/// at once, unless its machine is very busy; taken for one that doesn't, it would get messages for as long as it lives.
const TRIAL: Duration = Duration::from_secs(8);
/// Bytes of the memory that is lent for it.
const PROBE_PAGE: u64 = 64 << 10;
/// What is tried there, a get or a put of so many bytes: UCX may do each in another way.
const PROBES: [(bool, u64); 4] = [(false, 64), (false, PROBE_PAGE), (true, 64), (true, PROBE_PAGE)];

/// A lane that both ends agreed on. The worker is destroyed by whoever runs the lane.
pub(super) struct Made {
    pub(super) manner: Manner,
    pub(super) carrier: Carrier,
    /// For the detail of paths: what carries the bytes, and why it isn't something better.
    pub(super) detail: String,
    pub(super) context: Context,
    pub(super) worker: Worker,
    /// Towards the peer; one-sided owners have none.
    pub(super) endpoint: Option<Endpoint>,
    /// Where active messages arrive.
    pub(super) inbox: Option<Inbox>,
    /// The transport takes many puts in one call.
    pub(super) lists: bool,
}

/// Makes a lane as the initiator.
///
/// # Errors
/// Why there is none.
pub(super) fn knock(desk: &mut Desk, deadline: Instant) -> Result<Made> {
    let policy = desk.shared.config.ucx.one_sided;
    let mut against = String::new();
    if policy.worth_a_probe(has_adapters()) {
        match knock_one_sided(desk, deadline)? {
            Ok(made) => return Ok(made),
            Err(reason) => against = reason,
        }
    }
    let mut made = knock_for_messages(desk, deadline)?;
    if !against.is_empty() {
        made.detail = format!("{} (not put/get: {against})", made.detail);
    }
    Ok(made)
}

fn knock_one_sided(desk: &mut Desk, deadline: Instant) -> Result<Result<Made, String>> {
    let (manner, policy) = (Manner::OneSided, desk.shared.config.ucx.one_sided);
    let context = desk.shared.ucx.context(&desk.shared.config.ucx, true)?;
    if let Some(reason) = too_silent(policy, &context) {
        return Ok(Err(reason));
    }
    let worker = Worker::create(&context)?;
    let mode = mode(&context);
    offer(desk, manner, mode, &worker)?;
    let (base, address, key) = match desk.next(Some(&worker), deadline)? {
        Frame::Accept { base, address, key } => (base, address, key),
        Frame::Decline { last: false, reason } => return Ok(Err(format!("the peer declines: {reason}"))),
        other => return Err(declined(&other)),
    };
    let tried = worker
        .connect(&address, error_mode(mode))
        .and_then(|endpoint| try_a_put(desk, &context, &worker, endpoint, (base, &key), deadline));
    let (endpoint, (carrier, over), lists) = match tried {
        Ok(tried) => tried,
        // The side channel's end is the end; anything else is about this manner.
        Err(error) if error.kind() == ErrorKind::PeerLost => return Err(error),
        // Nobody says so: an owner that may not carry out what UCX emulates doesn't answer.
        Err(error) if error.kind() == ErrorKind::PeerUnreachable && policy == OneSidedPolicy::Any => {
            let reason = format!("a put fails: {}; is the peer's `one_sided` `any` too?", error.message());
            return Ok(Err(reason));
        }
        Err(error) => return Ok(Err(format!("a put fails: {}", error.message()))),
    };
    if !policy.allows(carrier) {
        return Ok(Err(format!(
            "{}, `one_sided` is `{}`",
            by(carrier, &over),
            policy.as_str()
        )));
    }
    desk.send(&Frame::Verdict {
        carrier,
        text: over.clone(),
    })?;
    match desk.next(Some(&worker), deadline)? {
        Frame::Ready => {}
        Frame::Decline { last: false, reason } => return Ok(Err(format!("the peer declines: {reason}"))),
        other => return Err(declined(&other)),
    }
    Ok(Ok(Made {
        manner,
        carrier,
        detail: detail(manner, &over, &context) + if lists { ", lists of spans" } else { "" },
        context,
        worker,
        endpoint: Some(endpoint),
        inbox: None,
        lists,
    }))
}

/// Puts into the memory that the owner lends, gets from it, and lets UCX say how it did each.
fn try_a_put(
    desk: &mut Desk,
    context: &Context,
    worker: &Worker,
    endpoint: Endpoint,
    (base, key): (u64, &[u8]),
    deadline: Instant,
) -> Result<(Endpoint, (Carrier, String), bool)> {
    let deadline = deadline.min(Instant::now() + TRIAL);
    let remote = endpoint.unpack(key, base, PROBE_PAGE)?;
    let page = HostRegion::allocate(PROBE_PAGE, HugePages::Never)?;
    let local = context.map(&page.into())?;
    let tally = Tally::new(worker);
    let settle = |desk: &mut Desk| {
        let over = || tally.outstanding() == 0 || endpoint.failure().is_some();
        desk.until(worker, deadline, over)?;
        tally.failure().or_else(|| endpoint.failure()).map_or(Ok(()), Err)
    };
    // What carries a put is settled while the connection is made, so that comes first.
    endpoint.flush(&tally)?;
    settle(desk)?;
    let policy = desk.shared.config.ucx.one_sided;
    let mut found = Vec::new();
    for (get, len) in PROBES {
        let probe = if get {
            endpoint.probe_get(&local, 0, &remote, 0, len, &tally)?
        } else {
            endpoint.probe_put(&local, 0, &remote, 0, len, &tally)?
        };
        let carrier = carrier_of(&probe);
        found.push((carrier, names(&probe.transports)));
        // Whoever won't have emulation has nobody at the other end who would carry it out.
        if !policy.allows(carrier) {
            break;
        }
        settle(desk)?;
        endpoint.flush(&tally)?;
        settle(desk)?;
    }
    let (carrier, over) = worst(found);
    let mut lists = false;
    if policy.allows(carrier) {
        // A tally of its own: a list that is refused says nothing against the lane.
        let trial = Tally::new(worker);
        let span = Span {
            local_offset: 0,
            remote_offset: 0,
            len: PROBE_PAGE,
        };
        if let Ok(probe) = endpoint.probe_list(&local, &remote, span, &trial) {
            desk.until(worker, deadline, || {
                trial.outstanding() == 0 || endpoint.failure().is_some()
            })?;
            lists = takes_lists(&probe) && trial.failure().is_none();
        }
        endpoint.failure().map_or(Ok(()), Err)?;
    }
    Ok((endpoint, (carrier, over), lists))
}

fn knock_for_messages(desk: &mut Desk, deadline: Instant) -> Result<Made> {
    let manner = Manner::ActiveMessages;
    let context = desk.shared.ucx.context(&desk.shared.config.ucx, false)?;
    let worker = Worker::create(&context)?;
    let mode = mode(&context);
    let inbox = worker.receive_messages(MESSAGES, InboxLimits::default())?;
    offer(desk, manner, mode, &worker)?;
    let address = match desk.next(Some(&worker), deadline)? {
        Frame::Accept { address, .. } => address,
        other => return Err(declined(&other)),
    };
    let endpoint = connect(&worker, &address, mode)?;
    let tally = Tally::new(&worker);
    endpoint.send_message(MESSAGES, &HELLO, &[], Delivery::Eager, &tally)?;
    let mut answered = false;
    desk.until(&worker, deadline, || {
        answered |= inbox.pop().is_some_and(|message| message.header == HELLO);
        (answered && endpoint.ready()) || endpoint.failure().is_some()
    })?;
    if let Some(error) = endpoint.failure() {
        return Err(error);
    }
    let lanes = endpoint.resources();
    let rdma = !lanes.is_empty() && lanes.iter().all(Resource::is_rdma);
    Ok(Made {
        manner,
        carrier: if rdma { Carrier::Rdma } else { Carrier::Emulated },
        detail: detail(manner, &names(&lanes), &context),
        context,
        worker,
        endpoint: Some(endpoint),
        inbox: Some(inbox),
        lists: false,
    })
}

fn offer(desk: &mut Desk, manner: Manner, mode: Mode, worker: &Worker) -> Result<()> {
    let address = worker.address()?;
    desk.send(&Frame::Offer { manner, mode, address })
}

/// Makes a lane as the owner.
///
/// # Errors
/// Why there is none; the initiator was told.
pub(super) fn answer(desk: &mut Desk, peer: PeerKey, deadline: Instant) -> Result<Made> {
    // Who says nothing holds a thread here, so not for long.
    let mut frame = desk.next(None, deadline.min(Instant::now() + FIRST_WORD))?;
    for _ in 0..MAX_OFFERS {
        let Frame::Offer { manner, mode, address } = frame else {
            return Err(misplaced(&frame));
        };
        if let Some(reason) = unwanted(&desk.shared.config) {
            return refuse(desk, Error::new(ErrorKind::Unsupported, "lane", reason));
        }
        if manner == Manner::ActiveMessages {
            return match answer_for_messages(desk, mode, &address, deadline) {
                Ok(made) => Ok(made),
                Err(error) => refuse(desk, error),
            };
        }
        frame = match answer_one_sided(desk, peer, deadline)? {
            Ok(made) => return Ok(made),
            Err(next) => next,
        };
    }
    refuse(desk, Error::new(ErrorKind::Integrity, "lane", "too many offers"))
}

/// Lends a page for a put and judges what it went over; or the frame that came instead.
fn answer_one_sided(desk: &mut Desk, peer: PeerKey, deadline: Instant) -> Result<Result<Made, Frame>> {
    let manner = Manner::OneSided;
    let policy = desk.shared.config.ucx.one_sided;
    if !policy.worth_a_probe(has_adapters()) {
        let lack = if policy == OneSidedPolicy::Rdma {
            ", and it has no adapter"
        } else {
            ""
        };
        let reason = format!("its `one_sided` is `{}`{lack}", policy.as_str());
        return decline(desk, None, reason, deadline).map(Err);
    }
    let emulates = policy == OneSidedPolicy::Any;
    let context = match desk.shared.ucx.context(&desk.shared.config.ucx, emulates) {
        Ok(context) => context,
        Err(error) => return refuse(desk, error),
    };
    if let Some(reason) = too_silent(policy, &context) {
        return decline(desk, None, reason, deadline).map(Err);
    }
    let lend = || {
        let worker = Worker::create(&context)?;
        let page = HostRegion::allocate(PROBE_PAGE, HugePages::Never)?;
        let lent = context.map(&page.into())?;
        let accept = Frame::Accept {
            base: lent.region().address(),
            address: worker.address()?,
            key: lent.pack()?,
        };
        Ok((worker, lent, accept))
    };
    let (worker, lent, accept) = match lend() {
        Ok(lent) => lent,
        Err(error) => return refuse(desk, error),
    };
    desk.send(&accept)?;
    let (carrier, text) = match desk.next(Some(&worker), deadline)? {
        Frame::Verdict { carrier, text } => (carrier, text),
        other => return Ok(Err(other)),
    };
    if !policy.allows(carrier) {
        let reason = format!("{}, its `one_sided` is `{}`", by(carrier, &text), policy.as_str());
        return decline(desk, Some(&worker), reason, deadline).map(Err);
    }
    // From now on the peer can write here without another word; a lost one is out when this lane is.
    match desk.shared.add_lane(peer, &desk.control, carrier) {
        Ok(()) => desk.send(&Frame::Ready)?,
        Err(error) if error.kind() == ErrorKind::PeerLost => return Err(error),
        Err(error) => return decline(desk, Some(&worker), error.message().to_owned(), deadline).map(Err),
    }
    drop(lent);
    Ok(Ok(Made {
        manner,
        carrier,
        detail: text,
        context,
        worker,
        endpoint: None,
        inbox: None,
        lists: false,
    }))
}

/// Lets the initiator connect, and returns once its first message came over that connection.
fn answer_for_messages(desk: &mut Desk, mode: Mode, address: &[u8], deadline: Instant) -> Result<Made> {
    let manner = Manner::ActiveMessages;
    let context = desk.shared.ucx.context(&desk.shared.config.ucx, false)?;
    let worker = Worker::create(&context)?;
    worker.check_address(address)?;
    let inbox = worker.receive_messages(MESSAGES, InboxLimits::default())?;
    desk.send(&Frame::Accept {
        base: 0,
        address: worker.address()?,
        key: Vec::new(),
    })?;
    // Only now an endpoint of our own: it takes the connection that the initiator made. If both ends began one,
    // each would choose transports by itself, and UCX ends the process where the two choices differ.
    let mut greeted = false;
    desk.until(&worker, deadline, || {
        greeted |= inbox.pop().is_some_and(|message| message.header == HELLO);
        greeted
    })?;
    let endpoint = connect(&worker, address, mode)?;
    Ok(Made {
        manner,
        carrier: Carrier::Emulated,
        detail: String::new(),
        context,
        worker,
        endpoint: Some(endpoint),
        inbox: Some(inbox),
        lists: false,
    })
}

/// Why this copy of UCX is not asked for puts under the policy: it would not say what carries them.
fn too_silent(policy: OneSidedPolicy, context: &Context) -> Option<String> {
    let library = context.library();
    let silent = policy != OneSidedPolicy::Any && !library.tells_what_carries();
    silent.then(|| format!("UCX {} doesn't say what carries a put", library.version()))
}

/// An endpoint, or why the two ends can't have one.
fn connect(worker: &Worker, address: &[u8], mode: Mode) -> Result<Endpoint> {
    worker.connect(address, error_mode(mode)).map_err(|error| {
        if error.kind() != ErrorKind::PeerUnreachable {
            return error;
        }
        let text = "UCX has no transport in common with the peer; its `tcp` is one only where `TLS` names it";
        Error::new(ErrorKind::PeerUnreachable, "lane", text).with_source(error)
    })
}

/// Says that this manner won't do and waits for the next offer.
fn decline(desk: &mut Desk, worker: Option<&Worker>, reason: String, deadline: Instant) -> Result<Frame> {
    desk.send(&Frame::Decline { last: false, reason })?;
    desk.next(worker, deadline)
}

/// Says that there will be no lane.
fn refuse<T>(desk: &mut Desk, error: Error) -> Result<T> {
    desk.send(&Frame::Decline {
        last: true,
        reason: super::reason_of(&error),
    })?;
    Err(error)
}

/// The error of an answer that is no yes.
fn declined(frame: &Frame) -> Error {
    match frame {
        Frame::Decline { reason, .. } => {
            Error::new(ErrorKind::Unsupported, "lane", format!("the peer declines: {reason}"))
        }
        other => misplaced(other),
    }
}

/// Watching for a lost peer costs shared memory and kernel copies, which only adapters do without.
fn mode(context: &Context) -> Mode {
    if context.has_rdma() { Mode::Peer } else { Mode::None }
}

fn error_mode(mode: Mode) -> ErrorMode {
    match mode {
        Mode::None => ErrorMode::None,
        Mode::Peer => ErrorMode::Peer,
    }
}

pub(super) fn by(carrier: Carrier, over: &str) -> String {
    format!("that would go by {carrier} over {over}")
}

fn detail(manner: Manner, over: &str, context: &Context) -> String {
    format!("{} over {over}, UCX {}", manner.as_str(), context.library().version())
}
