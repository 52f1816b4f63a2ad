-- The queue of a model: two sorted sets, `queue:<model>` (waiting, by place) and `claims:<model>` (popped, by the time the
-- claim ends), and the hash `accounts:<model>` with the accounts of both:
--   all               <sequences> <tokens> <virtual time> <arrivals> <window's begin, ms> <window's tokens> <tokens per second>
--                     <sum of lengths>: the usual length of an output, times 16
--                     <share of starts under their share, times 65536> <number of flows> <number at which flows are swept>
--   n:<tenant>        <sequences> <tokens>, while any wait
--   <class>:<tenant>  <counter> <credit, or less than 0: debt> of the tenant in this class: a flow
-- `queues` names the models with a queue that is not empty.
--
-- The order is start-time fair queueing, and a sequence's place in it is computed once, when it is accepted:
--   tag = max(virtual time - burst, counter); place = tag + classes below system * head start; counter = tag + charge
-- The virtual time is the highest tag of what was taken. So a tenant that was idle begins a burst ahead of the busy ones,
-- and tenants that are busy in one class are taken from in turn, equal numbers of tokens each. A class has a head start of
-- so many tokens, and no more: a sequence that waits is overtaken, per class of difference, by at most so many of each tenant.
--
-- A sequence whose tag is above the virtual time when it is accepted is `over` its tenant's share. One whose tag is at least
-- half a burst below is `under` it, if sequences of other tenants wait. Where many of the sequences that start are under
-- their share, `pop` keeps some of the workers' last places for these, and holds back those that are over their share.

local OUTPUT_WEIGHT = 2       -- a token of output costs a worker about as much as two of a prompt
local ARRIVALS = 1024         -- among equal places the order of arrival decides; so many arrivals can be told apart
local WINDOW_MS = 1000        -- the shortest time over which the drain rate is measured
local SMOOTHING_MS = 4000     -- a window of this length replaces the rate measured before; a shorter one, in proportion
local OUTPUTS = 16            -- the usual length of an output is that of about so many outputs
local BURSTS = 16             -- how many bursts a head start is
local SHARE_ONE = 65536       -- the share of starts is counted in so many parts
local STARTS = 64             -- the share of starts is that of about so many starts
local KEPT_PER_SHARE = 10     -- places that are kept if all that starts is under its share
local MIN_FLOWS = 64          -- so many flows need no sweep
local MAX_FLOWS = 2048        -- flows that are left after a sweep

local function accounts_of(store, model) return store.prefix .. 'accounts:' .. model end
local function flow_of(rec) return rec.priority .. ':' .. rec.tenant end

-- Reads "<number> <number> ..." into a list; zeros if there is none.
local function numbers(text, count)
  local list = {}
  for number in string.gmatch(text or '', '%S+') do list[#list + 1] = tonumber(number) end
  for i = #list + 1, count do list[i] = 0 end
  return list
end

local function packed(list)
  for i, number in ipairs(list) do list[i] = string.format('%.0f', number) end
  return table.concat(list, ' ')
end

local function parse_totals(text)
  local list = numbers(text, 11)
  return { count = list[1], tokens = list[2], virtual = list[3], arrivals = list[4], since = list[5], drained = list[6], rate = list[7],
    lengths = list[8], under = list[9], flows = list[10], sweep_at = list[11] }
end

local function packed_totals(t)
  return packed({ t.count, t.tokens, t.virtual, t.arrivals, t.since, t.drained, t.rate, t.lengths, t.under, t.flows, t.sweep_at })
end

local function totals(store, model) return parse_totals(redis.call('HGET', accounts_of(store, model), 'all')) end

-- The drain rate with what the window under way has seen, in tokens per second.
local function drain_rate(t, now)
  local span = now - t.since
  if span < WINDOW_MS then return t.rate end
  local measured = math.floor(t.drained * 1000 / span)
  return math.floor(t.rate + (measured - t.rate) * math.min(1, span / SMOOTHING_MS))
end

-- The models with a queue that is not empty, in the order of their names.
local function queued_models(store)
  local models = redis.call('SMEMBERS', store.prefix .. 'queues')
  table.sort(models)
  return models
end

local function put_in_queue(store, rec)
  if add_to_index(store, 'queue:' .. rec.model, rec.place, rec.id) then
    redis.call('SADD', store.prefix .. 'queues', rec.model)
    redis.call('PEXPIRE', store.prefix .. 'queues', ALIVE_MS)
  else renew(store.prefix .. 'queues') end
  set_deadline(store, rec)
end

-- Writes fields of a model's accounts.
local function keep_accounts(store, model, fresh, ...)
  local key = accounts_of(store, model)
  redis.call('HSET', key, ...)
  if fresh then redis.call('PEXPIRE', key, ALIVE_MS) else renew(key) end
end

-- Counts a sequence among those that wait. A queue that was empty begins a window: idle time is no slow draining.
local function count_in(t, tenant, cost, now)
  if t.count == 0 then t.since, t.drained = now, 0 end
  t.count, t.tokens = t.count + 1, t.tokens + cost
  tenant[1], tenant[2] = tenant[1] + 1, tenant[2] + cost
end

local function count_waiting(store, rec)
  local name = 'n:' .. rec.tenant
  local found = redis.call('HMGET', accounts_of(store, rec.model), 'all', name)
  local t, tenant = parse_totals(found[1]), numbers(found[2], 2)
  count_in(t, tenant, tonumber(rec.cost), now_ms())
  keep_accounts(store, rec.model, not found[1], 'all', packed_totals(t), name, packed(tenant))
end

-- Puts a running sequence back among those that wait. It is not charged again, and its place is the old one.
local function enter_queue(store, rec)
  put_in_queue(store, rec)
  count_waiting(store, rec)
end

-- Renews the lives of the keys of a model's queue.
local function renew_queue(store, model)
  for _, name in ipairs({ 'queue:' .. model, 'claims:' .. model, 'accounts:' .. model, 'queues' }) do
    redis.call('PEXPIRE', store.prefix .. name, ALIVE_MS)
  end
end

-- When nothing waits any more, all tenants are equal again, and what is measured of the queue stays.
local function forget_tenants(store, model, t)
  t.count, t.tokens, t.flows, t.sweep_at = 0, 0, 0, 0
  redis.call('DEL', accounts_of(store, model))
  keep_accounts(store, model, true, 'all', packed_totals(t))
  redis.call('SREM', store.prefix .. 'queues', model)
end

-- Forgets the accounts when nothing waits: records that expired while they waited were not subtracted from them.
local function settle_accounts(store, model)
  local waiting = redis.call('ZCARD', store.prefix .. 'queue:' .. model) + redis.call('ZCARD', store.prefix .. 'claims:' .. model)
  if waiting == 0 then forget_tenants(store, model, totals(store, model)) end
end

-- The sequence waits no more: it was taken, or has ended.
local function leave_queue(store, rec, was_taken)
  local queue, claims = store.prefix .. 'queue:' .. rec.model, store.prefix .. 'claims:' .. rec.model
  if redis.call('ZREM', claims, rec.id) == 0 and redis.call('ZREM', queue, rec.id) == 0 then return end
  local key, name, now = accounts_of(store, rec.model), 'n:' .. rec.tenant, now_ms()
  local found = redis.call('HMGET', key, 'all', name)
  local t, tenant, cost = parse_totals(found[1]), numbers(found[2], 2), tonumber(rec.cost)
  t.count, t.tokens = math.max(0, t.count - 1), math.max(0, t.tokens - cost)
  if now - t.since >= WINDOW_MS then t.rate, t.since, t.drained = drain_rate(t, now), now, 0 end
  t.drained = t.drained + cost
  if was_taken then
    t.virtual = math.max(t.virtual, tonumber(rec.tag))
    if rec.epoch == '0' then
      t.under = t.under + math.floor(((rec.share == 'under' and SHARE_ONE or 0) - t.under) / STARTS)
    end
  end
  if t.count == 0 then forget_tenants(store, rec.model, t)
  elseif tenant[1] <= 1 then
    redis.call('HDEL', key, name)
    keep_accounts(store, rec.model, false, 'all', packed_totals(t))
  else
    keep_accounts(store, rec.model, false, 'all', packed_totals(t), name, packed({ tenant[1] - 1, math.max(0, tenant[2] - cost) }))
  end
end

-- What a sequence is charged when it is accepted, with this many tokens of output.
local function charge_of(rec, output) return math.max(1, tonumber(rec.prompt_len) + OUTPUT_WEIGHT * output) end

-- Forgets the flows with a counter of at most `floor`: they are as if they had never been. If too many are left, those
-- with the lowest counters are forgotten, too: each of these tenants begins as an idle one, once more.
local function sweep_flows(store, model, t, floor)
  local key, names, counters, forgotten = accounts_of(store, model), {}, {}, {}
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local name = flat[i]
    if name ~= 'all' and string.sub(name, 1, 2) ~= 'n:' then
      counters[name] = numbers(flat[i + 1], 1)[1]
      if counters[name] <= floor then forgotten[#forgotten + 1] = name else names[#names + 1] = name end
    end
  end
  local function is_lower(a, b) return counters[a] < counters[b] or (counters[a] == counters[b] and a < b) end
  if #names > MAX_FLOWS then table.sort(names, is_lower) end
  t.flows = math.min(#names, MAX_FLOWS)
  for i = 1, #names - MAX_FLOWS do forgotten[#forgotten + 1] = names[i] end
  for _, name in ipairs(forgotten) do redis.call('HDEL', key, name) end
  t.sweep_at = math.max(MIN_FLOWS, 2 * t.flows)
end

-- How many tokens of output are expected of a new sequence: that of the usual length, in each branch.
local function expected_output(rec, branches, t)
  local expected = tonumber(rec.max_tokens)
  if t.lengths > 0 then expected = math.min(expected, math.floor(t.lengths / OUTPUTS) + 1) end
  return expected * branches
end

-- Gives a new sequence its tag and its place, and charges its tenant for an output of the usual length. Returns the
-- tenant's new counter and credit, packed. `others` is whether sequences of other tenants wait.
local function charge_tenant(store, rec, branches, t, flow, head_start, others)
  local counter, credit = unpack(numbers(flow, 2))
  local burst = math.floor(head_start / BURSTS)
  local floor = t.virtual - burst
  if not flow then
    counter = floor
    if t.flows >= math.max(MIN_FLOWS, t.sweep_at) then sweep_flows(store, rec.model, t, floor) end
    t.flows = t.flows + 1
  end
  local charge = charge_of(rec, expected_output(rec, branches, t))
  if counter <= floor then counter, credit = floor, 0 end
  if counter > t.virtual then rec.share = 'over'
  elseif others and counter <= t.virtual - math.ceil(burst / 2) then rec.share = 'under' end
  local spent = math.min(credit, charge - 1)
  local tag = counter + (tonumber(rec.priority) - 1) * head_start
  t.arrivals = t.arrivals + 1
  rec.charge, rec.tag = string.format('%.0f', charge), string.format('%.0f', counter)
  rec.place = string.format('%.0f', tag * ARRIVALS + t.arrivals % ARRIVALS)
  return packed({ counter + charge - spent, credit - spent })
end

-- Corrects what a sequence was charged when it ends: `output` tokens were computed, or nil if it never had an owner. What
-- a waiting sequence was charged leaves the counter. What another one has left over is credit for the tenant's next
-- sequences, and what it has used beyond is debt: so the next ones do not overtake those that wait.
local function correct_charge(store, rec, output)
  local key, name = accounts_of(store, rec.model), flow_of(rec)
  local found = redis.call('HMGET', key, 'all', name)
  local t = parse_totals(found[1])
  if not found[1] or (not found[2] and (t.lengths > 0 or not output)) then return end
  if output then
    local length = math.floor(output / #rec.finishes)
    t.lengths = t.lengths > 0 and t.lengths - math.floor(t.lengths / OUTPUTS) + length or OUTPUTS * length
  end
  if found[2] then
    local counter, credit = unpack(numbers(found[2], 2))
    local charge = tonumber(rec.charge)
    if output then credit = credit + charge - charge_of(rec, output) else counter = counter - charge end
    redis.call('HSET', key, 'all', packed_totals(t), name, packed({ counter, credit }))
  else
    redis.call('HSET', key, 'all', packed_totals(t))
  end
end

-- How many of the workers' last places are kept now for sequences that are not over their tenant's share, `most` at most.
local function kept_places(t, most) return math.min(most, math.floor(t.under * KEPT_PER_SHARE / SHARE_ONE + 0.5)) end

-- The bound that a new sequence would exceed; nil if there is none. A bound of 0 does not exist. One sequence may always
-- wait, however many tokens it counts for.
local function exceeded_bound(t, tenant, cost, max_requests, max_tokens, tenant_requests, tenant_tokens)
  if tenant_requests > 0 and tenant[1] >= tenant_requests then return 'TENANT_REQUESTS' end
  if tenant_tokens > 0 and tenant[1] > 0 and tenant[2] + cost > tenant_tokens then return 'TENANT_TOKENS' end
  if t.count >= max_requests then return 'REQUESTS' end
  if t.count > 0 and t.tokens + cost > max_tokens then return 'TOKENS' end
  return nil
end
