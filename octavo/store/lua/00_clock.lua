-- Milliseconds since the epoch by the server's clock. Tests put another file in the place of this one.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
